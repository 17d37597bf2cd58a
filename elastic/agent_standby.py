"""A process that stands by: the job's command run as far as `elastic.session()`, for the worker's place.

It has imported JAX and the script's modules, and where its adapter can, it has played the worlds alone that
it may be in (see `elastic.solo_worlds`); no backend is left of that. It is prepared at the lowest priority
while a world trains; one that is not ready yet is stopped while a recovery goes on. Its
death means nothing to the job: another one is prepared, after growing pauses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from elastic import low_priority
from elastic.events import WorldSpec
from elastic.job import ROLE_WARM, JobSpec
from elastic.protocol import Hello, Rehearse, Rehearsed
from elastic.wire import FramedSocket
from elastic.worker_process import WorkerExit, WorkerProcess, start_time, write_pid

WARM_FILE = "warm.pid"
CALM_COMMITS = 3
"""Steps of a world before a process is prepared: its first steps have the processors to themselves."""
STARVED_S = ((20.0, low_priority.LOW), (60.0, low_priority.LESS_LOW))
"""Where all processors are busy the lowest priority gets nothing: so it gets a little, then more."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class StandbyProcess:
    """One process at, or on its way to, its session. `role` is `ROLE_WARM` or `ROLE_SHADOW`."""

    def __init__(self, spec: JobSpec, member: int, role: str, on_exit: Callable[[WorkerExit], None]) -> None:
        self.process = WorkerProcess.start(spec, member, on_exit, role=role)
        self.connection: FramedSocket | None = None
        self.is_rehearsing = False
        """Whether it plays worlds alone."""
        self.has_rehearsed = False
        self._is_paused = False
        self._began_s = time.monotonic()
        self._steps_up = list(STARVED_S)
        low_priority.lower(self.process.pid)

    @property
    def is_ready(self) -> bool:
        """Whether it has reached its session."""
        return self.connection is not None

    @property
    def is_busy(self) -> bool:
        """Whether it prepares something, and does not only wait."""
        return not self.is_ready or self.is_rehearsing

    def rehearse(self, worlds: tuple[WorldSpec, ...]) -> None:
        """Have it play these worlds alone."""
        assert self.connection is not None
        self.is_rehearsing = True
        with contextlib.suppress(OSError):  # its end is noticed through the pidfd
            self.connection.send(Rehearse(worlds=worlds))

    def meet(self, connection: FramedSocket, hello: Hello) -> bool:
        """Take its connection, if it is the process that says hello."""
        if hello.pid != self.process.pid:
            return False
        self.connection = connection
        return True

    def pause(self) -> None:
        """Stop preparing; nothing if it only waits."""
        if self.is_busy and not self._is_paused:
            self._is_paused = True
            _signal(self.process.pid, signal.SIGSTOP)

    def look_after(self) -> None:
        """See to it that it gets on."""
        while self._steps_up and time.monotonic() - self._began_s > self._steps_up[0][0]:
            low_priority.lower_less(self.process.pid, self._steps_up.pop(0)[1])

    def go_on(self) -> None:
        """Prepare further."""
        if self._is_paused:
            self._is_paused = False
            _signal(self.process.pid, signal.SIGCONT)

    def end(self, *, wait: bool = False) -> None:
        """End it; at low priority that may take a while, which only `wait` waits for."""
        self.process.kill()
        if wait:
            low_priority.restore(self.process.pid)
            self.process.wait_exit(2.0)
        if self.connection is not None:
            self.connection.close()


class WarmWorker:
    """Keeps one process warm for the worker of a slice; for the agent's one thread.

    `worlds` tells what the process is to play alone when it is at its session. `clock` is monotonic. What an
    earlier agent left behind is ended.
    """

    def __init__(
        self,
        spec: JobSpec,
        member: int,
        directory: Path,
        on_exit: Callable[[WorkerExit], None],
        *,
        worlds: Callable[[], tuple[WorldSpec, ...]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._member = member
        self._path = directory / WARM_FILE
        self._on_exit = on_exit
        self._worlds = worlds
        self._clock = clock
        self._may_rehearse = True
        self._standby: StandbyProcess | None = None
        self._commits = 0
        self._deaths = 0
        self._not_before_s = 0.0
        self._end_left_behind()

    @property
    def pid(self) -> int | None:
        """The process that stands by."""
        return None if self._standby is None else self._standby.process.pid

    @property
    def is_ready(self) -> bool:
        """Whether a process waits at its session."""
        return self._standby is not None and self._standby.is_ready

    def committed(self) -> None:
        """The worker has committed a step: prepare a process if there is none, once the world is calm."""
        self._commits += 1
        if not self._spec.warm or self._commits < CALM_COMMITS:
            return
        if self._standby is not None:
            self._standby.go_on()
            if self._standby.is_busy:
                self._standby.look_after()
        elif self._clock() >= self._not_before_s:
            self._standby = StandbyProcess(self._spec, self._member, ROLE_WARM, self._on_exit)
            write_pid(self._path, self._standby.process.pid)

    def recovering(self, *, has_worker: bool) -> None:
        """A recovery has begun: leave the processors to the worker, if this host still has one."""
        self._commits = 0
        if self._standby is not None:
            self._standby.pause() if has_worker else self._standby.go_on()

    def meet(self, connection: FramedSocket, hello: Hello) -> bool:
        """Take the connection of the process that stands by; False if it is another's."""
        if self._standby is None or not self._standby.meet(connection, hello):
            return False
        self._deaths = 0
        if worlds := self.worlds():
            self._standby.rehearse(worlds)
        return True

    def hear(self, connection: FramedSocket, message: object) -> bool:
        """Take in what the process that stands by says; False if it is another's word."""
        if self._standby is None or self._standby.connection is not connection:
            return False
        if isinstance(message, Rehearsed):
            self._standby.is_rehearsing = False
            self._standby.has_rehearsed = True
            self.rehearsed(message)
        return True

    def rehearsed(self, message: Rehearsed) -> None:
        """Take in how a rehearsal of any process here went: one that failed would fail the same way again."""
        self._may_rehearse = self._may_rehearse and not message.error

    def worlds(self) -> tuple[WorldSpec, ...]:
        """What a process of this host is to play alone."""
        return self._worlds() if self._may_rehearse else ()

    def take(self) -> StandbyProcess | None:
        """Hand over the process, at normal priority, ready or not, for the worker's place; None if there is
        none. The caller tells it that it is its turn, having written down that it is the worker.
        """
        standby, self._standby = self._standby, None
        if standby is None:
            return None
        self._path.unlink(missing_ok=True)
        if standby.process.wait_exit(0.0):
            return None  # it has ended; its exit is on its way, and will be nobody's
        low_priority.restore(standby.process.pid)
        return standby

    def ended(self, exit_: WorkerExit) -> bool:
        """Take in that a process ended; False if it was not the one that stands by."""
        if self._standby is None or self._standby.process.pid != exit_.pid:
            return False
        if self._standby.connection is not None:
            self._standby.connection.close()
        self._may_rehearse = self._may_rehearse and not self._standby.is_rehearsing
        self._standby = None
        self._path.unlink(missing_ok=True)
        self._not_before_s = self._clock() + min(FIRST_PAUSE_S * 2.0**self._deaths, MAX_PAUSE_S)
        self._deaths += 1
        return True

    def close(self) -> None:
        """End the process."""
        if self._standby is not None:
            self._standby.end(wait=True)
            self._standby = None
        self._path.unlink(missing_ok=True)

    def _end_left_behind(self) -> None:
        try:
            left = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])
            if start_time(left["pid"]) == left["start_time"]:
                os.kill(left["pid"], signal.SIGKILL)
        except (OSError, msgspec.MsgspecError, KeyError):
            pass  # there was none, or it has ended with its agent
        self._path.unlink(missing_ok=True)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
