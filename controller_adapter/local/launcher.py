"""Running a script under the local adapter: one child process, followed through its history.

Whatever happens to the script, its processes and its snapshot memory end with the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from types import FrameType

from controller_adapter.local.control import ENV_CONTROL_FD, ControlClient, Simulate
from controller_adapter.local.engine import run_started
from elastic.history import HistoryWriter
from elastic.job import ENV_DIRECTORY, ENV_LEASH_FD, ENV_SLICE, HISTORY_FILE, JobSpec, save_job
from elastic.launcher import POLL_S, STOP_GRACE_S, HistoryTail, Listener
from elastic.records import FaultInjected, RunEnded
from reshard.errors import JobFailedError
from snapshot.job import JobLock

LOG = "worker.log"
FAILED_GRACE_S = 2.0


class LocalLauncher:
    """Runs one job. Also what the chaos tooling aims at (`simulate`, `note`)."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._lock = JobLock.acquire(spec.job_id, root=spec.shm_root)
        save_job(spec)
        self._control = ControlClient()
        self._child: subprocess.Popen[bytes] | None = None
        self._interrupts = 0
        self._stop_by_s: float | None = None

    # ---- what the chaos tooling may do ----

    def simulate(self, kind: str, slices: tuple[int, ...]) -> None:
        """Let a fault happen to these slices at once; returns when the training process has taken it in."""
        with contextlib.suppress(OSError):  # it has ended by itself: the fault came too late
            self._control.ask(Simulate(kind=kind, slices=slices))

    def note(self, fault: FaultInjected) -> None:
        """Have an injected fault written into the history."""
        with contextlib.suppress(OSError):
            self._control.ask(fault)

    # ---- the run ----

    def run(self, listeners: list[Listener]) -> RunEnded:
        """Run the script to its end, return how the run ended. Raises JobFailedError if it did not say."""
        previous = {
            number: signal.signal(number, self._interrupted) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            self._start()
            return self._follow(listeners)
        finally:
            self._end()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        history_path = self.spec.directory / HISTORY_FILE
        history_path.unlink(missing_ok=True)
        history = HistoryWriter(history_path)
        history.write(run_started(self.spec))
        history.close()
        log_path = self.spec.directory / "logs" / LOG
        log_path.parent.mkdir(parents=True, exist_ok=True)
        leash_read, self._leash_write = os.pipe()
        child_end = self._control.child_end.fileno()
        environment = os.environ | self.spec.worker_environment
        environment |= {
            ENV_DIRECTORY: str(self.spec.directory),
            ENV_SLICE: "0",
            ENV_LEASH_FD: str(leash_read),
            ENV_CONTROL_FD: str(child_end),
        }
        with log_path.open("wb") as log:
            self._child = subprocess.Popen(
                self.spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=(leash_read, child_end),
            )
        os.close(leash_read)
        self._control.child_end.close()

    def _follow(self, listeners: list[Listener]) -> RunEnded:
        assert self._child is not None
        tail = HistoryTail(self.spec.directory / HISTORY_FILE)
        while True:
            status = self._child.poll()
            for record in tail.read():
                for listener in listeners:
                    listener.feed(record)
                if isinstance(record, RunEnded):
                    return self._wait_end(record)
            if status is not None:
                raise self._unexpected_end(status)
            if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
                raise JobFailedError("interrupted", remedy="Everything it started was ended.")
            time.sleep(POLL_S)

    def _wait_end(self, ended: RunEnded) -> RunEnded:
        """Let the script come to its own end: after a completed run it may take its time (a last save)."""
        assert self._child is not None
        is_patient = ended.outcome == "completed"
        bound_s = time.monotonic() + FAILED_GRACE_S
        while self._child.poll() is None and (is_patient or time.monotonic() < bound_s):
            if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
                break
            time.sleep(POLL_S)
        return ended

    def _unexpected_end(self, status: int) -> JobFailedError:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return JobFailedError(
            f"the training process {how} before the run did",
            remedy=f"Its output is in {self.spec.directory / 'logs' / LOG}.",
        )

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._stop_by_s = time.monotonic()
            return
        self._stop_by_s = time.monotonic() + STOP_GRACE_S
        with contextlib.suppress(OSError):
            self._control.stop(f"interrupted ({signal.Signals(number).name})")

    def _end(self) -> None:
        """End what is left of the script's processes, and remove its memory."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            os.close(self._leash_write)
        self._control.close()
        self._lock.unlink()
