"""An agent's process of a shadow group: see `elastic.moves_shadow`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.agent_standby import StandbyProcess
from elastic.events import LeftWorld, StepFailed, WorkerFailed, WorldSpec
from elastic.job import ROLE_SHADOW, JobSpec
from elastic.protocol import EnterWorld, Hello, TakeTurn
from elastic.shadow_events import EndShadow, EnterShadow, ShadowTold, StartShadow
from elastic.wire import FramedSocket
from elastic.worker_process import WorkerExit
from snapshot.job import job_directory

ROOM_FACTOR = 2
"""A shadow process needs about what the worker has; as much again stays free."""


class ShadowRunner:
    """Runs one process at a time; for the agent's one thread. `tell` gets each ShadowTold."""

    def __init__(
        self,
        spec: JobSpec,
        member: int,
        tell: Callable[[ShadowTold], None],
        on_exit: Callable[[WorkerExit], None],
    ) -> None:
        self._spec = spec
        self._member = member
        self._tell = tell
        self._on_exit = on_exit
        self._number = 0
        self._standby: StandbyProcess | None = None

    def obey(self, command: StartShadow | EnterShadow | EndShadow, worker_pid: int | None) -> None:
        """Do what the coordinator says; a command for a group that is over changes nothing."""
        if isinstance(command, StartShadow):
            self._start(command.number, worker_pid)
        elif command.number == self._number and isinstance(command, EndShadow):
            self.end()
        elif command.number == self._number and isinstance(command, EnterShadow):
            self._enter(command)

    def meet(self, connection: FramedSocket, hello: Hello) -> bool:
        """Take the connection of the group's process; False if it is another's."""
        if self._standby is None or not self._standby.meet(connection, hello):
            return False
        self._say("ready")
        return True

    def hear(self, connection: FramedSocket, message: Any) -> bool:
        """Take in what the process says; False if it is another's word."""
        if self._standby is None or self._standby.connection is not connection:
            return False
        if isinstance(message, LeftWorld):
            self._say("done")
        elif isinstance(message, StepFailed | WorkerFailed):
            self._say("failed", message.error)
        return True

    def ended(self, exit_: WorkerExit) -> bool:
        """Take in that a process ended; False if it was not this one."""
        if self._standby is None or self._standby.process.pid != exit_.pid:
            return False
        self._standby = None
        self._say("failed", str(exit_))
        return True

    def look_after(self) -> None:
        """See to it that the process gets on."""
        if self._standby is not None:
            self._standby.look_after()

    def end(self, *, wait: bool = False) -> None:
        """End the process, without a word; with `wait`, wait for that."""
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.end(wait=wait)

    def _start(self, number: int, worker_pid: int | None) -> None:
        self.end()
        self._number = number
        lack = lack_of_memory(worker_pid, num_hosts_here(self._spec))
        if lack:
            self._say("skipped", lack)
        else:
            self._standby = StandbyProcess(self._spec, self._member, ROLE_SHADOW, self._on_exit)

    def _enter(self, command: EnterShadow) -> None:
        if self._standby is None or self._standby.connection is None:
            return
        config = self._spec.config
        world = WorldSpec(
            generation=command.number,
            rank=command.rank,
            slices=command.slices,
            service_address=command.service_address,
            restore_step=None,
            newest_committed=-1,
            rehearsal=True,
            replicas=config.replicas,
            persists=config.persists,
            audit_every=config.audit_every,
        )
        with contextlib.suppress(OSError):  # its end is noticed through the pidfd
            self._standby.connection.send(TakeTurn())
            self._standby.connection.send(EnterWorld(world=world))

    def _say(self, state: Any, detail: str = "") -> None:
        told = ShadowTold(member=self._member, number=self._number, state=state, detail=detail[:500])
        self._tell(told)


def num_hosts_here(spec: JobSpec) -> int:
    """Hosts of this job on this machine: each has a directory in its memory."""
    with contextlib.suppress(OSError):
        return max(sum(path.is_dir() for path in job_directory(spec.shm_root, spec.job_id).iterdir()), 1)
    return 1


def lack_of_memory(worker_pid: int | None, num_hosts: int) -> str:
    """Why there is no room for another process as large as the worker on each host here; "" if there is."""
    try:
        available = _field_bytes(Path("/proc/meminfo"), "MemAvailable")
        used = _field_bytes(Path(f"/proc/{worker_pid}/status"), "VmRSS") if worker_pid else 0
    except (OSError, KeyError):
        return ""
    needed = ROOM_FACTOR * used * num_hosts
    if available >= needed:
        return ""
    return f"{available >> 20} MiB of memory are available, {needed >> 20} MiB would be wanted"


def _field_bytes(path: Path, name: str) -> int:
    """A field of a file in /proc that counts in kB."""
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(fields[name].split()[0]) << 10
