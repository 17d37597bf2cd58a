"""An agent's side of its writer process: started with a job, watched through its reports, stopped."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence

from reshard.errors import UsageError
from snapshot.persist_jobs import Done, Failed, Job, Progress, decode_report, encode_line

_STOP_TIMEOUT_S = 5.0


class WriterProcess:
    """One job in a process of its own; always `wait` for it, from any thread, also after `stop`.

    Starting it takes some milliseconds, with a large layout until the process reads its job. `prefix` is a
    command put before it, such as `("ionice", "-c3")`.
    """

    def __init__(self, job: Job, *, prefix: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "snapshot.persist_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an agent's Ctrl-C is not the writer's: it ends with its input
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: `wait` tells
            self._process.stdin.write(encode_line(job))
            self._process.stdin.flush()

    def wait(self, on_progress: Callable[[int], None] = lambda written_bytes: None) -> Done | Failed:
        """Return how the job ended; `on_progress` gets the bytes that are durable so far.

        A writer that died, or was stopped, has failed with kind "persistent-tier:stopped".
        """
        result: Done | Failed | None = None
        assert self._process.stdout is not None
        with self._process.stdout as reports, contextlib.suppress(UsageError):
            for line in reports:
                report = decode_report(line)
                if isinstance(report, Progress):
                    on_progress(report.written_bytes)
                else:
                    result = report
        self._close_input()
        status = self._process.wait()
        if result is None:
            message = f"the writer process ended with status {status} before it was done"
            return Failed(kind="persistent-tier:stopped", message=message, remedy="Write it again.")
        return result

    def stop(self) -> None:
        """End the process, whatever it does; what it wrote stays. Harmless when it has ended."""
        self._close_input()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
