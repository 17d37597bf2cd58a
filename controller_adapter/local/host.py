"""A virtual host: one slice's snapshot memory and what its agent would do with it, in this process.

All methods are for the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from controller_adapter.local.faults import SimulatedFault
from elastic.agent_buddies import BuddyKeeper, Pull
from elastic.agent_fetch import Fetch
from elastic.agent_persist import Persister
from elastic.agent_tasks import ArenaTasks
from elastic.events import (
    ComputeDigest,
    DigestDone,
    Event,
    FinishPersist,
    PersistSettled,
    SnapshotSummary,
    Stage,
    StagePersisted,
    WorkerState,
)
from elastic.job import JobSpec
from elastic.protocol import Replicated, WorkerCommitted
from elastic.records import StepCommitted
from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.persist_tree import TreeDescription


class VirtualHost:
    """The memory of a slice, and where its part of the one worker stands; `fetch` reads others' memory."""

    def __init__(
        self, spec: JobSpec, slice_index: int, fetch: Fetch, pull: Pull, tell: Callable[[Event], None]
    ) -> None:
        self.slice_index = slice_index
        self.worker = WorkerState.NONE
        self.incarnation = 0
        """Stands for a process id: another one for each start of this slice's part of the worker."""
        self.world_generation = 0
        """The world it was last told to enter."""
        self.fence_pending = False
        self.stopped: SimulatedFault | None = None
        self.arena: Arena | None = None
        self._spec = spec
        self._fetch = fetch
        self._pull = pull
        self._buddies: BuddyKeeper | None = None
        self.captured_last = (-1, -1)
        """Generation and step of the newest capture into this slice's memory."""
        self.replicated = (-1, -1)
        """Generation and step of the newest capture of which it has what it keeps for other slices."""
        self._tell = tell
        self._persister: Persister | None = None
        self._tasks: ArenaTasks | None = None
        self._size = (-1, 0)
        """A generation, and the bytes of one capture in it."""

    # ---- life ----

    def start(self, incarnation: int) -> None:
        """A new part of the worker begins; memory that was lost is made anew, empty."""
        self.incarnation = incarnation
        self.worker = WorkerState.STARTING
        if self.arena is None:
            host = HostId(self.slice_index)
            self.arena = Arena.create(self._spec.job_id, host, root=self._spec.shm_root)
            replicas = self._spec.config.replicas
            self._buddies = BuddyKeeper(self.arena, host, replicas, self._pull, self._note_copies)
            root = self._spec.persist_root
            self._tasks = ArenaTasks(
                self.arena,
                self.slice_index,
                fetch=self._fetch,
                persist_root=root,
                count_writes=self._spec.config.count_writes,
            )
            if self._spec.persist is not None:
                self._persister = Persister(
                    self._spec.persist,
                    self._spec.job_id,
                    self.slice_index,
                    self._spec.config.replicas,
                    self.arena,
                    self._tell,
                )
            self._size = (-1, 0)

    def end(self) -> None:
        """Its part of the worker is gone; its memory stays."""
        self.worker = WorkerState.NONE
        self.stopped = None

    def lose_memory(self) -> None:
        """Its snapshots are gone, and their files."""
        if self._buddies is not None:
            self._buddies.close()
            self._buddies = None
        self.give_up_persisting()
        self._persister = None
        if self.arena is not None:
            self.arena.unlink()
        self.arena = self._tasks = None

    # ---- looking into the memory ----

    def verified_snapshots(self) -> tuple[tuple[SnapshotSummary, ...], tuple[str, ...]]:
        """The complete snapshots with the shards whose bytes match their checksum; and what was refused."""
        return ((), ()) if self._tasks is None else self._tasks.verified_snapshots()

    def summary_of(self, step: int, generation: int) -> SnapshotSummary | None:
        """The snapshot of one step and generation, as it says it is."""
        return None if self._tasks is None else self._tasks.summary_of(step, generation)

    def committed_record(self, message: WorkerCommitted) -> StepCommitted | None:
        """The record of a committed step, samples out of this slice's own journal; None without an entry.

        The stall is that of the one thread, the same for all slices; the captured bytes are this slice's.
        """
        record = None if self._tasks is None else self._tasks.committed_record(message)
        if record is None or not message.captured_bytes:
            return record
        return replace(record, captured_bytes=self._captured_bytes(message.generation))

    def bytes_from(self, summary: SnapshotSummary) -> dict[str, int]:
        """What this slice's devices took, by tier: what had been staged came from peers.

        Each distinct box that the slice has in the restored layout counts once.
        """
        layout, host = summary.layout, HostId(self.slice_index)
        boxes = ((array, layout.boxes_by_host(array).get(host, ())) for array in layout.arrays)
        total = sum(array.box_nbytes(box) for array, held in boxes for box in held)
        assert self._tasks is not None
        return self._tasks.bytes_from({"shm": total})

    def _captured_bytes(self, generation: int) -> int:
        """The bytes of one capture of this slice, which do not change while a world lives."""
        if self._size[0] != generation and self.arena is not None:
            manifests = (m for m in self.arena.manifests().complete if m.generation == generation)
            shards = next(manifests).static.shards
            self._size = (generation, sum(entry.nbytes for entry in shards))
        return self._size[1]

    # ---- what it keeps for other slices ----

    def keep_for_others(self, slot_bytes: int) -> None:
        """Make room for it. Raises InsufficientMemoryError."""
        if self._buddies is not None and slot_bytes:
            self._buddies.reserve(slot_bytes)

    def replicate(self) -> None:
        """Copy what belongs here of the newest capture out of the others' memory."""
        if self._buddies is not None:
            self._buddies.pull_newest(*self.captured_last)

    def _note_copies(self, message: Replicated) -> None:
        self.replicated = message.generation, message.step

    # ---- the persistent tier ----

    def describe(self, tree: TreeDescription) -> None:
        """The training thread tells how the tree of its state looks."""
        if self._persister is not None:
            self._persister.describe(tree)

    def captured(self, generation: int, step: int) -> None:
        """The training thread has captured a step into this host's memory."""
        self.captured_last = generation, step
        if self._persister is not None:
            self._persister.captured(generation, step)

    def loop_ended(self) -> None:
        """The training loop is over."""
        if self._persister is not None:
            self._persister.loop_ended()

    def finish_persist(self, command: FinishPersist) -> None:
        """Put the shares of a snapshot together for good."""
        if self._persister is not None:
            self._persister.finish(command)

    def persist_settled(self, command: PersistSettled) -> None:
        """A step is in the persistent tier, or will not be."""
        if self._persister is not None:
            self._persister.settled(command)

    def give_up_persisting(self) -> None:
        """What is being written will not be complete."""
        if self._persister is not None:
            self._persister.cancel()

    # ---- what an agent would do ----

    def stage_persisted(self, command: StagePersisted) -> None:
        """Read this slice's boxes from the persistent tier into its memory. Raises ElasticError, OSError."""
        assert self._tasks is not None
        self._tasks.stage_persisted_now(command)

    def stage(self, command: Stage) -> None:
        """Copy what the plan gives this slice out of the others' memory into its own, verified.

        Raises ElasticError or OSError when it cannot.
        """
        assert self._tasks is not None
        self._tasks.stage_now(command)

    def digest(self, command: ComputeDigest) -> DigestDone:
        """Put the whole state together out of all slices' memory and hash it."""
        assert self._tasks is not None
        return self._tasks.digest_now(command)
