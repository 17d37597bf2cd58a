"""Running `elastic demo` as a user does, and looking for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic.report_schema import Report

ROOT = Path(__file__).resolve().parent.parent
MARK = "ELASTIC_SOAK_MARK"
"""In the environment of everything a run starts: what is left of it can be found, and nothing else is."""
STOP_GRACE_S = 10.0
LEFT_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCase:
    """One demo run, given by what goes on its command line."""

    slices: int = 3
    steps: int = 120
    faults: tuple[str, ...] = ("none",)
    seed: int = 0
    rejoin_after_steps: int = 40
    options: tuple[str, ...] = ()
    """Further arguments."""

    def arguments(self) -> tuple[str, ...]:
        """The arguments of `elastic`."""
        faults = [word for fault in self.faults for word in ("--fault", fault)]
        sizes = ["--slices", str(self.slices), "--steps", str(self.steps), "--seed", str(self.seed)]
        rejoin = ("--rejoin-after-steps", str(self.rejoin_after_steps))
        return ("demo", *sizes, *rejoin, *self.options, *faults)

    def command(self) -> str:
        """What to type to run it again."""
        return shlex.join(["elastic", *self.arguments()])


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """How one demo run went. `status` is None when it did not end in time; `left` is what it left behind."""

    case: DemoCase
    directory: Path
    status: int | None
    wall_s: float
    report: Report | None
    left: tuple[str, ...]

    def tail(self, num_lines: int = 12) -> str:
        """The end of what it printed."""
        return "\n".join((self.directory / "demo.log").read_text(errors="replace").splitlines()[-num_lines:])


def exit_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does, through the clean-up of the run in progress."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def run_demo(
    case: DemoCase, directory: Path, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> DemoRun:
    """Run the case, its output and report in `directory` (emptied first); end it after `timeout_s`."""
    from elastic.report import read_report
    from reshard.errors import UsageError

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    mark = secrets.token_hex(8)
    # A root of its own: whatever is in it afterwards was left by this run.
    shm_root = Path("/dev/shm") / f"demo-run-{mark}"
    shm_root.mkdir(mode=0o700)
    began_s = time.monotonic()
    try:
        status = _run(case, directory, shm_root, mark, timeout_s, dict(environment or os.environ))
        wall_s = time.monotonic() - began_s
        left = tuple(_left(mark, shm_root))
    finally:
        _end_marked(mark)
        shutil.rmtree(shm_root, ignore_errors=True)
    report = None
    with contextlib.suppress(UsageError):
        report = read_report(directory)
    return DemoRun(case=case, directory=directory, status=status, wall_s=wall_s, report=report, left=left)


def _run(
    case: DemoCase, directory: Path, shm_root: Path, mark: str, timeout_s: float, environment: dict[str, str]
) -> int | None:
    command = [sys.executable, "-m", "elastic", *case.arguments()]
    command += ["--out", str(directory), "--shm-dir", str(shm_root)]
    with (directory / "demo.log").open("wb") as log:
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            return job.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if job.poll() is None:
                job.terminate()  # the launcher ends all that it started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(timeout=STOP_GRACE_S)
                job.kill()
                job.wait()


def _left(mark: str, shm_root: Path) -> Iterator[str]:
    bound_s = time.monotonic() + LEFT_GRACE_S
    while (processes := list(marked_processes(mark))) and time.monotonic() < bound_s:
        time.sleep(0.02)
    for pid in processes:
        yield f"process {pid} ({_command(pid)})"
    for path in sorted(shm_root.rglob("*")):
        yield f"{path}"


def marked_processes(mark: str) -> Iterator[int]:
    """The processes that carry the mark, zombies left out."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                yield int(path.name)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "ended"


def _end_marked(mark: str) -> None:
    for pid in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
