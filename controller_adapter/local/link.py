"""The `Link` of a session in one process: each call is made in the name of all slices of the world."""

from __future__ import annotations

import time
from collections.abc import Mapping

from controller_adapter.local.engine import TICK_S, LocalEngine
from elastic.events import Captured, Finished, LaidOut, LeftWorld, Rebuilt, WorkerFailed, WorldSpec
from elastic.ports import JobOver, Room
from elastic.protocol import WorkerCommitted
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.arena import Arena
from snapshot.persist_tree import TreeDescription


class LocalLink:
    """See `elastic.ports.Link`; for the training thread only."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self._awaits_copies = False

    # ---- waiting and looking ----

    def wait_world(self) -> WorldSpec | None:
        """Block until the next world is assigned; None when the job is complete.

        Raises JobOver when it was stopped.
        """
        while True:
            self.engine.pump()
            if self._is_complete():
                return None
            world = self.engine.hosts.enter()
            if world is not None:
                return world
            self.engine.pump(TICK_S)

    def is_fenced(self, generation: int) -> bool:
        """Whether the world of `generation` has been given up. Blocks while a slice of it is stopped."""
        self.engine.pump()
        while self.engine.is_held():
            self.engine.pump(TICK_S)
        return self._is_given_up(generation) or self.engine.is_failed()

    def stop_step(self, generation: int) -> int | None:
        """The step after whose boundary to stop, None to go on."""
        stop = self.engine.hosts.stop_after
        return stop.step if stop is not None and stop.generation == generation else None

    def audit_step(self, generation: int) -> int | None:
        """The step whose capture, or the first one after it, is to be an audit; None without an order."""
        audit = self.engine.hosts.audit_after
        return audit.step if audit is not None and audit.generation == generation else None

    def wait_fenced(self, generation: int, timeout_s: float | None) -> bool:
        """Block until the world is given up (True), or the time is over or the job complete (False).

        Raises JobOver when the job was stopped.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.engine.pump()
        while not self._is_complete() and not self._is_given_up(generation):
            if until_s is not None and time.monotonic() >= until_s:
                return False
            self.engine.pump(TICK_S)
        return self._is_given_up(generation)

    def arenas(self) -> Mapping[HostId, Arena]:
        """The snapshot memory of the slices that are in this world."""
        members = self.engine.hosts.members()
        return {HostId(host.slice_index): host.arena for host in members if host.arena is not None}

    # ---- telling ----

    def reserve(self, host: HostId, room: Room) -> None:
        """Make room in a slice's memory. Raises InsufficientMemoryError."""
        self.arenas()[host].reserve(
            room.slot_bytes,
            journal_record_bytes=room.journal_record_bytes,
            journal_records=room.journal_records,
        )
        self._awaits_copies = room.buddy_bytes is not None
        self.engine.hosts.all[host.slice_index].keep_for_others(room.buddy_bytes or 0)

    def replicated_step(self, generation: int) -> int | None:
        """The newest step of which every slice has what it keeps for others: copied as soon as captured."""
        return self.engine.hosts.replicated_step(generation) if self._awaits_copies else None

    def rebuilt(
        self, generation: int, restored_step: int | None, form_s: float, restore_s: float, shm_bytes: int
    ) -> None:
        """Tell that the state is on the devices; bytes are worked out slice by slice."""
        for host in self.engine.hosts.members():
            snapshot = None if restored_step is None else host.summary_of(restored_step, generation)
            self.engine.take(
                Rebuilt(
                    member=host.slice_index,
                    generation=generation,
                    snapshot=snapshot,
                    form_s=form_s,
                    restore_s=restore_s,
                    bytes_from={} if snapshot is None else host.bytes_from(snapshot),
                )
            )
        self.engine.pump()

    def laid_out(self, generation: int, layout: Layout, lacking: str = "") -> None:
        """Tell where each box of the world's state is, or is to be; see `Link`."""
        for host in self.engine.hosts.members()[:1]:  # none, when all of its slices were lost meanwhile
            index = host.slice_index
            self.engine.take(LaidOut(member=index, generation=generation, layout=layout, lacking=lacking))

    def described(self, tree: TreeDescription) -> None:
        """Tell how the tree of the world's state looks: the same on every slice."""
        for host in self.engine.hosts.members():
            host.describe(tree)

    def captured(self, host: HostId, generation: int, step: int, checksums: bytes, *, is_audit: bool) -> None:
        """Tell the checksums of one slice's capture, or audit."""
        if not is_audit:
            self.engine.hosts.captured(host.slice_index, generation, step)
        self.engine.take(
            Captured(
                member=host.slice_index,
                generation=generation,
                step=step,
                checksums=checksums,
                is_audit=is_audit,
            )
        )

    def committed(self, message: WorkerCommitted) -> None:
        """Tell that a step's outputs are ready and captured, on every slice of the world."""
        self.engine.commit(message)
        self.engine.pump()

    def left(self, generation: int) -> None:
        """Tell that the loop has stopped at a boundary as told."""
        for host in self.engine.hosts.members():
            self.engine.take(LeftWorld(member=host.slice_index, generation=generation))

    def ended(self, generation: int, step: int) -> None:
        """Tell that the training loop has come to its end."""
        for host in self.engine.hosts.members():
            host.loop_ended()
            snapshots, _ = host.verified_snapshots()
            self.engine.take(
                Finished(member=host.slice_index, generation=generation, step=step, snapshots=snapshots)
            )

    def step_failed(self, generation: int, error: str, devices: str | None = None) -> None:
        """Tell that a step failed. Every loss is known at once: without one the error is the script's."""
        self.engine.pump()
        if not self._is_given_up(generation):
            self.user_failed(error, 1)

    def user_failed(self, error: str, exit_status: int) -> None:
        """Tell that the user's code raised; the job ends with this status."""
        members = self.engine.hosts.members()
        first = members[0].slice_index if members else 0
        self.engine.take(WorkerFailed(member=first, error=error, exit_status=exit_status))

    def rehearsed(self, generation: int, error: str) -> None:
        """The one process of this adapter is in every world: it plays none alone."""
        raise NotImplementedError

    def unwound(self, generation: int) -> None:
        """Tell that the training thread is out of its world."""
        self.engine.hosts.leave()
        self.engine.pump()

    def _is_given_up(self, generation: int) -> bool:
        return generation < self.engine.hosts.fenced_below

    def _is_complete(self) -> bool:
        if self.engine.is_failed():
            raise JobOver(f"the job has ended: {self.engine.error}")
        return self.engine.is_over()
