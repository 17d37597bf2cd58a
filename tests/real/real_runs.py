"""Running the demo, and other jobs, as a user does: real processes and signals, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.records import Record, StepCommitted, of_kind, read_history
from elastic.report import read_report
from elastic.report_schema import Report

REPOSITORY = Path(__file__).resolve().parents[2]
COMPILE_CACHE = REPOSITORY / "runs" / "test-compile-cache"
STEPS = 80
BOUND_S = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run ended, and what it wrote."""

    status: int
    output: str
    directory: Path

    @property
    def report(self) -> Report:
        """The run's report."""
        return read_report(self.directory)

    @property
    def records(self) -> list[Record]:
        """The run's history."""
        return list(read_history(self.directory / "events.jsonl"))

    def losses(self) -> dict[int, float | None]:
        """The loss of each step, as it was last committed."""
        return {record.step: record.loss for record in of_kind(self.records, StepCommitted)}

    def samples(self) -> dict[int, tuple[int, ...]]:
        """The samples of each step, as the journals have them."""
        return {record.step: record.sample_ids for record in of_kind(self.records, StepCommitted)}


def start(directory: Path, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start `elastic …` in the background, its output in a pipe; `prefix` goes before the command."""
    COMPILE_CACHE.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "elastic", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(COMPILE_CACHE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], directory: Path, timeout_s: float = BOUND_S) -> Run:
    """Wait for a run's end; ends it, and fails, when it takes longer than `timeout_s`."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        raise AssertionError(f"not done after {timeout_s} s:\n{output}") from None
    return Run(status=process.returncode, output=output, directory=directory)


def demo(directory: Path, *arguments: str, steps: int = STEPS, faults: Sequence[str] = ("none",)) -> Run:
    """One demo run to its end."""
    wanted = [argument for fault in faults for argument in ("--fault", fault)]
    process = start(directory, "demo", "--steps", str(steps), "--out", str(directory), *wanted, *arguments)
    return finish(process, directory)


def assert_nothing_lost(run: Run, steps: int = STEPS) -> None:
    """The run is complete and every promise of the design was held."""
    assert run.status == 0, run.output
    report = run.report
    assert report.run.outcome == "completed"
    assert report.steps.committed == steps
    assert (report.steps.lost, report.steps.repeated) == (0, 0)
    assert (report.samples.lost, report.samples.repeated) == (0, 0)
    assert set(report.invariants.values()) == {"held"}, report.invariants


def left_behind(run_id: str) -> list[str]:
    """What is left of a job: its snapshot memory, and processes that name its directory."""
    return [path.name for path in Path("/dev/shm").glob(f"elastic-{run_id}*")]


def processes_naming(text: str) -> list[int]:
    """The processes whose command line or environment names `text` (a run's directory)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                named = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in named:
                found.append(int(entry.name))
    return found
