"""Keeping a job's coordinator alive: started again when it ends, and another one when it hangs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import tenacity

from elastic.arbiter import ArbiterStore, Watch
from elastic.pauses import pause_s
from reshard.errors import ElasticError, JobFailedError

MAX_STARTS = 5
"""So often in a row a coordinator is started without a new step in the history; then the job fails."""
LOOK_EVERY_S = 0.2
STARTUP_S = 60.0
"""How long a coordinator may take to its term of office before another is tried."""
_PAUSES = tenacity.wait_random_exponential(multiplier=0.1, max=5.0)


class CoordinatorKeeper:
    """For the launcher's loop: `look` again and again. `start` starts a process, which waits for its turn by
    itself; `log` is where it says what went wrong.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        store: ArbiterStore,
        log: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._store = store
        self._log = log
        self._clock = clock
        self._current: subprocess.Popen[bytes] | None = None
        self._hung: list[subprocess.Popen[bytes]] = []
        self._watch = Watch()
        self._started_s = 0.0
        self._start_at_s: float | None = None
        self._next_look_s = 0.0
        self._num_starts = 0
        self._newest_step = -1

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """All that were started and are not known to have ended, the one that counts last."""
        return [*self._hung, *([self._current] if self._current is not None else [])]

    def start(self) -> None:
        """Start a coordinator."""
        self._current = self._start()
        self._started_s, self._start_at_s = self._clock(), None
        self._watch = Watch()
        self._num_starts += 1

    def stay(self) -> bool:
        """After a completed run: start a coordinator that was killed again, as agents may not have heard the
        end from it; False when that was done too often.
        """
        if self._current is None or self._current.poll() in (None, 0):
            return True
        if self._num_starts >= MAX_STARTS:
            return False
        self.start()
        return True

    def note_step(self, step: int) -> None:
        """A step is in the history: a new one shows that the coordinator is of use."""
        if step > self._newest_step:
            self._newest_step = step
            self._num_starts = 1

    def look(self) -> None:
        """Start another coordinator where there is none that commands. Raises JobFailedError."""
        now_s = self._clock()
        self._hung = [process for process in self._hung if process.poll() is None]
        if self._start_at_s is not None:
            if now_s >= self._start_at_s:
                self.start()
            return
        assert self._current is not None
        status = self._current.poll()
        if status is not None:
            self._check_starts(f"ended with status {status}")
            self._start_at_s = now_s + pause_s(_PAUSES, self._num_starts)
        elif now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_EVERY_S
            if self._is_hung(now_s):
                self._check_starts("hung")
                # It is left alone: if it ever goes on, it finds itself fenced.
                self._hung.append(self._current)
                self.start()

    def _is_hung(self, now_s: float) -> bool:
        assert self._current is not None
        try:
            tenure = self._store.read()
        except (OSError, ElasticError):
            return False
        if tenure is None or not tenure.holder.startswith(f"{self._current.pid}-"):
            return now_s - self._started_s > STARTUP_S
        return self._watch.look(tenure, now_s)

    def _check_starts(self, how: str) -> None:
        if self._num_starts >= MAX_STARTS:
            raise JobFailedError(
                f"the coordinator was started {self._num_starts} times without a new step;"
                f" the last one {how}",
                remedy=f"See {self._log}.",
            )
