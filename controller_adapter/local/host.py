"""A virtual host: one slice's snapshot memory and what its agent would do with it, in this process.

All methods are for the training thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from controller_adapter.local.faults import SimulatedFault
from elastic.agent_tasks import ArenaTasks
from elastic.events import ComputeDigest, SnapshotSummary, Stage, WorkerState, host_of
from elastic.job import JobSpec
from elastic.protocol import WorkerCommitted
from elastic.records import StepCommitted
from reshard.boxes import Box
from reshard.errors import MissingShardError
from reshard.execute import execute_plan
from reshard.ids import HostId
from reshard.plan import Plan, Transfer
from snapshot.arena import Arena
from snapshot.digest import state_digest
from snapshot.source import ShardSource

Peers = Mapping[int, Arena]
"""The snapshot memory of every slice that has one, by slice index."""


class VirtualHost:
    """The memory of a slice, and where its part of the one worker stands."""

    def __init__(self, spec: JobSpec, slice_index: int) -> None:
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
        self._tasks: ArenaTasks | None = None
        self._staged_bytes = 0
        self._captured: tuple[int, int] = (-1, 0)

    # ---- life ----

    def start(self, incarnation: int) -> None:
        """A new part of the worker begins; memory that was lost is made anew, empty."""
        self.incarnation = incarnation
        self.worker = WorkerState.STARTING
        if self.arena is None:
            host = host_of(self.slice_index)
            self.arena = Arena.create(self._spec.job_id, host, root=self._spec.shm_root)
            self._tasks = ArenaTasks(self.arena, self.slice_index, token="")
            self._captured = (-1, 0)

    def end(self) -> None:
        """Its part of the worker is gone; its memory stays."""
        self.worker = WorkerState.NONE
        self.stopped = None

    def lose_memory(self) -> None:
        """Its snapshots are gone, and their files."""
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
        layout, host = summary.layout, host_of(self.slice_index)
        boxes = ((array, layout.boxes_by_host(array).get(host, ())) for array in layout.arrays)
        total = sum(array.box_nbytes(box) for array, held in boxes for box in held)
        peer, self._staged_bytes = min(self._staged_bytes, total), 0
        return {"shm": total - peer, "peer": peer}

    def _captured_bytes(self, generation: int) -> int:
        """The bytes of one capture of this slice, which do not change while a world lives."""
        if self._captured[0] != generation and self.arena is not None:
            manifests = (m for m in self.arena.manifests().complete if m.generation == generation)
            shards = next(manifests).static.shards
            self._captured = (generation, sum(entry.nbytes for entry in shards))
        return self._captured[1]

    # ---- what an agent would do ----

    def stage(self, command: Stage, peers: Peers) -> None:
        """Copy what the plan gives this slice out of the others' memory into its own, verified.

        Raises ElasticError or OSError when it cannot.
        """
        assert self.arena is not None
        self.arena.drop_stage()
        self._staged_bytes = 0
        by_source: dict[HostId, list[Transfer]] = defaultdict(list)
        for transfer in command.transfers:
            by_source[transfer.source].append(transfer)
        shards: list[tuple[str, Box, np.ndarray[Any, Any]]] = []
        for source_host, transfers in sorted(by_source.items()):
            source = open_peer(peers, source_host, command.step, command.of_generation)
            try:
                for transfer in transfers:
                    piece = source.read_piece(transfer.path, transfer.piece)
                    shards.append((transfer.path, transfer.piece, _as_bytes(piece)))
            finally:
                source.close()
        if shards:
            self.arena.write_stage(
                command.layout,
                shards,
                step=command.step,
                generation=command.generation,
                position=command.position,
            )
            self._staged_bytes = sum(len(data) for _, _, data in shards)


def whole_state_digest(command: ComputeDigest, peers: Peers) -> str:
    """Put the whole state together out of all slices' memory and hash it. Raises ElasticError or OSError."""
    host = host_of(command.slice_index)
    sources: dict[HostId, ShardSource] = {}

    def get(transfer: Transfer) -> np.ndarray[Any, np.dtype[Any]]:
        if transfer.source not in sources:
            sources[transfer.source] = open_peer(peers, transfer.source, command.step, command.of_generation)
        return sources[transfer.source].read_piece(transfer.path, transfer.piece)

    try:
        plan = Plan.of(command.step, command.transfers, bytes_lower_bound=0)
        buffers = execute_plan(plan, command.layout, host, get).buffers
    finally:
        for source in sources.values():
            source.close()
    arrays = {array.path: array for array in command.layout.arrays}
    return state_digest(
        (path, arrays[path].dtype, arrays[path].shape, buffer.reshape(-1).view(np.uint8))
        for (path, _), buffer in buffers.items()
    )


def open_peer(peers: Peers, host: HostId, step: int, generation: int) -> ShardSource:
    """A reader of what a slice holds of a step. Raises MissingShardError when its memory is gone."""
    arena = peers.get(host.slice_index)
    if arena is None:
        raise MissingShardError("every array", (), step, lost=(host,))
    return arena.find_shards(step, generation)


def _as_bytes(elements: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return elements.reshape(-1).view(np.uint8) if elements.size else np.empty(0, np.uint8)
