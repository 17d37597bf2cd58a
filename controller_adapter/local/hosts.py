"""All virtual hosts of a job: what its agents would do, and where the one training thread stands.

Everything here is for the training thread. What the agents would send to the coordinator goes to `tell`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from controller_adapter.local.host import VirtualHost
from elastic.agent_fetch import Want, read_pieces
from elastic.events import (
    AgentAttached,
    AgentCommand,
    Assign,
    AuditAfter,
    ComputeDigest,
    EndWorker,
    Event,
    Fence,
    Fenced,
    FinishPersist,
    PersistSettled,
    ResetHost,
    Shutdown,
    Stage,
    Staged,
    StagePersisted,
    StartWorker,
    StopAfter,
    WorkerReady,
    WorkerState,
    WorldSpec,
)
from elastic.job import JobSpec
from elastic.join_events import HostPrepared, PrepareHost
from reshard.errors import ElasticError, MissingShardError
from reshard.ids import HostId
from reshard.redundancy import BuddyCopy
from snapshot.checksum import checksum
from snapshot.slot import Bytes

FIRST_INCARNATION = 1 << 23
"""Above every process id that Linux gives out, so that nobody can signal an incarnation by mistake."""
IN_PROCESS = "in-process"


class VirtualHosts:
    """The hosts by slice index, and the training thread's place among the worlds."""

    def __init__(self, spec: JobSpec, tell: Callable[[Event], None]) -> None:
        self.all = tuple(
            VirtualHost(spec, index, self._fetch, self._pull, tell) for index in range(spec.config.num_slices)
        )
        self.inside = 0
        """The generation of the world that the training thread is in (0: none)."""
        self.fenced_below = 0
        """Every world before this generation has been given up."""
        self.stop_after: StopAfter | None = None
        self.audit_after: AuditAfter | None = None
        self._tell = tell
        self._next_world: WorldSpec | None = None
        self._incarnations = itertools.count(FIRST_INCARNATION)

    def attach(self) -> None:
        """Tell of every host that it is there."""
        for host in self.all:
            self._say_attached(host)

    # ---- the training thread, in the name of its slices ----

    def members(self) -> tuple[VirtualHost, ...]:
        """The hosts that are in the world which the training thread is in."""
        return tuple(
            host
            for host in self.all
            if host.worker is WorkerState.IN_WORLD and host.world_generation == self.inside
        )

    def captured(self, slice_index: int, generation: int, step: int) -> None:
        """A slice of the world has been captured; with the last one, all copy what they keep for others."""
        self.all[slice_index].captured(generation, step)
        members = self.members()
        if all(host.captured_last == (generation, step) for host in members):
            for host in members:
                host.replicate()

    def replicated_step(self, generation: int) -> int:
        """The newest step of which every slice of the world has what it keeps for others; -1: none."""
        found = [host.replicated for host in self.members()]
        steps = [step for of_generation, step in found if of_generation == generation]
        return min(steps) if len(steps) == len(found) else -1

    def enter(self) -> WorldSpec | None:
        """Enter the world that was assigned, if any."""
        world, self._next_world = self._next_world, None
        if world is not None:
            self.inside = world.generation
            self.stop_after = self.audit_after = None
        return world

    def leave(self) -> None:
        """The training thread is out of its world, and free for the next."""
        for host in self.members():
            host.worker = WorkerState.READY
        self.inside = 0
        for host in self.all:
            self._say_if_ready(host)
            self.report_if_fenced(host)

    def report_if_fenced(self, host: VirtualHost) -> None:
        """Tell what is in a host's memory, once it is out of every world given up."""
        if not host.fence_pending or host.worker is WorkerState.IN_WORLD:
            return
        host.fence_pending = False
        snapshots, rejected = host.verified_snapshots()
        self._tell(
            Fenced(
                member=host.slice_index,
                generation=self.fenced_below,
                worker=host.worker,
                snapshots=snapshots,
                rejected=rejected,
            )
        )

    # ---- the machine's commands ----

    def perform(self, command: AgentCommand) -> None:
        """Do at once what the command's host is told; events that follow from it are told."""
        _PERFORM[type(command)](self, self.all[command.member], command)

    def _start_worker(self, host: VirtualHost, command: StartWorker) -> None:
        if host.worker in (WorkerState.NONE, WorkerState.IN_WORLD):
            host.start(next(self._incarnations))
            self._say_if_ready(host)

    def _end_worker(self, host: VirtualHost, command: EndWorker) -> None:
        host.end()
        self.report_if_fenced(host)

    def _fence(self, host: VirtualHost, command: Fence) -> None:
        self.fenced_below = max(self.fenced_below, command.generation)
        self._next_world = None
        host.fence_pending = True
        host.give_up_persisting()
        if command.leave_out:
            host.end()
        elif host.worker is WorkerState.IN_WORLD and host.world_generation != self.inside:
            host.worker = WorkerState.READY  # it was assigned, but has not entered
        self.report_if_fenced(host)

    def _stop_after(self, host: VirtualHost, command: StopAfter) -> None:
        self.stop_after = command

    def _audit_after(self, host: VirtualHost, command: AuditAfter) -> None:
        self.audit_after = command

    def _stage(self, host: VirtualHost, command: Stage | StagePersisted) -> None:
        error = ""
        try:
            if isinstance(command, StagePersisted):
                host.stage_persisted(command)
            else:
                host.stage(command)
        except (ElasticError, OSError) as failed:
            error = str(failed)
        self._tell(Staged(member=host.slice_index, generation=command.generation, error=error))

    def _finish_persist(self, host: VirtualHost, command: FinishPersist) -> None:
        host.finish_persist(command)

    def _persist_settled(self, host: VirtualHost, command: PersistSettled) -> None:
        host.persist_settled(command)

    def _digest(self, host: VirtualHost, command: ComputeDigest) -> None:
        self._tell(host.digest(command))

    def _fetch(self, command: Stage | ComputeDigest, source: HostId, wants: Sequence[Want]) -> list[Bytes]:
        """What an agent would ask another one for, out of that slice's memory."""
        arena = self.all[source.slice_index].arena
        if arena is None:
            raise MissingShardError(*wants[0], command.step, lost=(source,))
        return read_pieces(arena, command.step, command.of_generation, wants)

    def _pull(
        self,
        generation: int,
        step: int,
        copies: Sequence[BuddyCopy],
        views: Sequence[memoryview],
        given_up: threading.Event,
    ) -> list[int]:
        """What an agent would pull from the slices that hold it."""
        checksums = []
        for copy, view in zip(copies, views, strict=True):
            arena = self.all[copy.sources[0].slice_index].arena
            if arena is None:
                raise MissingShardError(copy.path, copy.box, step, lost=copy.sources)
            (data,) = read_pieces(arena, step, generation, [(copy.path, copy.box)])
            view[:] = data.data
            checksums.append(checksum(data))
        return checksums

    def _assign(self, host: VirtualHost, command: Assign) -> None:
        host.worker = WorkerState.IN_WORLD
        host.world_generation = command.world.generation
        if command.world.rank == 0:
            self._next_world = command.world

    def _reset(self, host: VirtualHost, command: ResetHost) -> None:
        host.end()
        self._say_attached(host)

    def _shut_down(self, host: VirtualHost, command: Shutdown) -> None:
        host.end()
        host.lose_memory()

    # ---- telling ----

    def _say_attached(self, host: VirtualHost) -> None:
        self._tell(
            AgentAttached(
                member=host.slice_index,
                worker=host.worker,
                worker_pid=host.incarnation,
                generation=self.fenced_below,
                data_address=IN_PROCESS,
            )
        )

    def _prepare(self, host: VirtualHost, command: PrepareHost) -> None:
        """There is one thread: what it made room for now, it would make room for at the join."""
        self._tell(HostPrepared(member=host.slice_index))

    def _say_if_ready(self, host: VirtualHost) -> None:
        """A starting slice is ready at once, but not while the one thread is in a broken world."""
        if host.worker is WorkerState.STARTING and not 0 < self.inside < self.fenced_below:
            host.worker = WorkerState.READY
            self._tell(WorkerReady(member=host.slice_index, pid=host.incarnation))


_PERFORM: dict[type[Any], Callable[[VirtualHosts, VirtualHost, Any], None]] = {
    StartWorker: VirtualHosts._start_worker,
    EndWorker: VirtualHosts._end_worker,
    Fence: VirtualHosts._fence,
    StopAfter: VirtualHosts._stop_after,
    AuditAfter: VirtualHosts._audit_after,
    Stage: VirtualHosts._stage,
    StagePersisted: VirtualHosts._stage,
    FinishPersist: VirtualHosts._finish_persist,
    PersistSettled: VirtualHosts._persist_settled,
    ComputeDigest: VirtualHosts._digest,
    Assign: VirtualHosts._assign,
    PrepareHost: VirtualHosts._prepare,
    ResetHost: VirtualHosts._reset,
    Shutdown: VirtualHosts._shut_down,
}
