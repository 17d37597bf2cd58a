"""The worker process as its agent sees it: started or adopted, watched through a pidfd, ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic.events import WorkerState
from elastic.job import ENV_DIRECTORY, ENV_HOST, ENV_LEASH_FD, ENV_SLICE, ENV_STANDBY, JobSpec
from elastic.leash import leash_fd
from elastic.memory_evidence import MemoryWatch
from elastic.parent_death import dying_with_parent

PID_FILE = "worker.pid"
"""In a host's arena: which process its worker is."""
LEASE_EXIT_STATUS = 75
"""A worker's exit status when it ended itself for want of an agent (EX_TEMPFAIL)."""
REHEARSAL_EXIT_STATUS = 76
"""A process's exit status when it ended itself because it did not get out of a world that it played alone."""


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if there is none. With the pid it names one
    process for good.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return -1


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker ended: an exit status, or minus the signal's number; None when it was not our child."""

    pid: int
    status: int | None

    @property
    def is_loss(self) -> bool:
        """Whether something killed it (rather than the user's code ending)."""
        own = (LEASE_EXIT_STATUS, REHEARSAL_EXIT_STATUS)
        return self.status is None or self.status < 0 or self.status in own

    @property
    def signal_name(self) -> str:
        """The signal that ended it, "" if none did."""
        return signal.Signals(-self.status).name if self.status is not None and self.status < 0 else ""

    def __str__(self) -> str:
        if self.status is None:
            return "the worker ended"
        if self.status < 0:
            return f"the worker was killed by {self.signal_name}"
        return f"the worker ended with status {self.status}"


def describe_end(exit_: WorkerExit, state: WorkerState) -> str:
    """How a worker's end that nothing caused from outside is told."""
    if state is not WorkerState.STARTING:
        return f"{exit_} in the middle of the job"
    if exit_.status == 0:
        return "the script ended without calling elastic.session(): is it one that trains under the engine?"
    return f"{exit_} before its session began"


class WorkerProcess:
    """One worker. `on_exit` is called once from a thread when it has ended, by whatever cause."""

    def __init__(
        self, pid: int, on_exit: Callable[[WorkerExit], None], child: subprocess.Popen[bytes] | None
    ) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._child = child
        self._on_exit = on_exit
        self.memory = MemoryWatch(pid)
        threading.Thread(target=self._wait_exit, name="worker-exit", daemon=True).start()

    @classmethod
    def start(
        cls, spec: JobSpec, member: int, on_exit: Callable[[WorkerExit], None], *, role: str = ""
    ) -> WorkerProcess:
        """Start the job's command as the worker of a host; its output goes to `DIR/logs/worker-N.log`.

        With a `role` it waits at its session until its turn comes (`elastic.agent_standby`); until then it
        ends with the calling thread.
        """
        environment = os.environ | spec.worker_environment
        environment[ENV_DIRECTORY] = str(spec.directory)
        host = spec.config.host(member)
        environment[ENV_SLICE], environment[ENV_HOST] = str(host.slice_index), str(host.host_index)
        environment.pop(ENV_STANDBY, None)
        if role:
            environment[ENV_STANDBY] = role
        leash = leash_fd()
        if leash is not None:
            environment[ENV_LEASH_FD] = str(leash)
        log_path = spec.worker_file(member, "log")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            child = subprocess.Popen(
                dying_with_parent(spec.command) if role else spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=() if leash is None else (leash,),
            )
        return cls(child.pid, on_exit, child)

    @classmethod
    def adopt(cls, pid: int, on_exit: Callable[[WorkerExit], None]) -> WorkerProcess | None:
        """Watch a worker that an earlier agent started; None when it has ended meanwhile."""
        try:
            return cls(pid, on_exit, None)
        except ProcessLookupError:
            return None

    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP): it cannot do anything until somebody continues it."""
        return is_stopped(self.pid)

    def kill(self) -> None:
        """End it now."""
        with self._lock, contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
            if not self._ended.is_set():
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait_exit(self, timeout_s: float) -> bool:
        """Wait until it has ended; False when it has not in time."""
        return self._ended.wait(timeout_s)

    def _wait_exit(self) -> None:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.poll()
        status = self._child.wait() if self._child is not None else None
        with self._lock:
            self._ended.set()
            os.close(self._pidfd)
        self._on_exit(WorkerExit(pid=self.pid, status=status))


def write_pid(path: Path, pid: int) -> None:
    """Let a later agent find the process: its owner alone may read or change who that is."""
    unfinished = path.with_suffix(".pid.new")
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(msgspec.json.encode({"pid": pid, "start_time": start_time(pid)}))
    unfinished.replace(path)
