"""What an agent does with its arena: report and verify snapshots, fetch from peers, compute digests, read
the journal.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic.events import ComputeDigest, DigestDone, SnapshotSummary, Stage, Staged, host_of
from elastic.protocol import WorkerCommitted
from elastic.records import StepCommitted
from reshard.errors import ElasticError
from reshard.execute import execute_plan
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.plan import Plan, Transfer
from snapshot.arena import Arena
from snapshot.dataplane import fetch
from snapshot.digest import state_digest
from snapshot.journal import JournalReader
from snapshot.manifest import Manifest

FETCH_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What an arena holds, verified while the host was fenced off from what is older than `generation`."""

    generation: int
    snapshots: tuple[SnapshotSummary, ...]
    rejected: tuple[str, ...]


class ArenaTasks:
    """The arena work of one agent. Fetching and digests run in threads and tell their result through
    `send`.
    """

    def __init__(self, arena: Arena, slice_index: int, token: str) -> None:
        self._arena = arena
        self._slice = slice_index
        self._token = token
        self._journal: JournalReader | None = None
        self._staged_bytes = 0

    def verify(self, generation: int, tell: Callable[[Verified], None]) -> None:
        """Verify all snapshots in a thread; tells what is good, as of `generation`."""

        def work() -> None:
            snapshots, rejected = self.verified_snapshots()
            tell(Verified(generation=generation, snapshots=snapshots, rejected=rejected))

        threading.Thread(target=work, name="verify", daemon=True).start()

    def snapshots(self) -> tuple[SnapshotSummary, ...]:
        """The complete snapshots as they say they are."""
        return tuple(_summary(manifest, manifest.holdings()) for manifest in self._arena.manifests().complete)

    def verified_snapshots(self) -> tuple[tuple[SnapshotSummary, ...], tuple[str, ...]]:
        """The complete snapshots, with only those shards whose bytes match their checksum; and what was
        refused.
        """
        verified = self._arena.verified_snapshots()
        summaries = tuple(_summary(manifest, holdings) for manifest, holdings in verified.snapshots)
        return summaries, tuple(f"{r.name}: {r.reason}" for r in verified.rejected)

    def summary_of(self, step: int, generation: int) -> SnapshotSummary | None:
        """The snapshot of one step and generation as it says it is (its bytes are verified when they are
        used).
        """
        for manifest in self._arena.manifests().complete:
            if (manifest.step, manifest.generation) == (step, generation):
                return _summary(manifest, manifest.holdings())
        return None

    def committed_record(self, message: WorkerCommitted) -> StepCommitted | None:
        """The record of a committed step, with the samples as this host's journal has them; None
        without an entry.
        """
        if self._journal is None:
            self._journal = self._arena.journal_reader()
        for entry in reversed(self._journal.since(message.step - 1)):
            if (entry.step, entry.generation) == (message.step, message.generation):
                ids = tuple(int(sample) for sample in entry.sample_ids)
                return StepCommitted(
                    unix_s=time.time(),
                    generation=message.generation,
                    slice_index=self._slice,
                    step=message.step,
                    position=entry.position - len(ids),
                    sample_ids=ids,
                    loss=message.loss,
                    step_s=message.step_s,
                    stall_s=message.stall_s,
                    captured_bytes=message.captured_bytes,
                    compile_s=message.compile_s,
                    cache_hits=message.cache_hits,
                    cache_misses=message.cache_misses,
                )
        return None

    def bytes_from(self, restored: dict[str, int]) -> dict[str, int]:
        """What a worker read for its restore, by tier: what this agent had fetched came from peers."""
        peer = min(self._staged_bytes, restored.get("shm", 0))
        self._staged_bytes = 0
        return {"shm": restored.get("shm", 0) - peer, "peer": peer}

    def stage(self, command: Stage, generation: Callable[[], int], send: Callable[[Any], None]) -> None:
        """Fetch what the plan gives this host; tells Staged."""

        def work() -> None:
            error = ""
            try:
                self._stage(command)
            except (ElasticError, OSError) as failed:
                error = str(failed)
            if command.generation == generation():
                send(Staged(slice_index=self._slice, generation=command.generation, error=error))

        if command.transfers:
            threading.Thread(target=work, name="stage", daemon=True).start()
        else:
            self._arena.drop_stage()
            self._staged_bytes = 0
            send(Staged(slice_index=self._slice, generation=command.generation))

    def _stage(self, command: Stage) -> None:
        shards = []
        by_source: dict[HostId, list[Transfer]] = defaultdict(list)
        for transfer in command.transfers:
            by_source[transfer.source].append(transfer)
        for source, transfers in sorted(by_source.items()):
            fetched = fetch(
                command.addresses[source.slice_index],
                self._token,
                generation=command.generation,
                step=command.step,
                wants=[(transfer.path, transfer.piece) for transfer in transfers],
                deadline_s=FETCH_DEADLINE_S,
                of_generation=command.of_generation,
            )
            shards += [(shard.path, shard.box, shard.data) for shard in fetched]
        self._arena.write_stage(
            command.layout,
            shards,
            step=command.step,
            generation=command.generation,
            position=command.position,
        )
        self._staged_bytes = sum(len(data) for _, _, data in shards)

    def compute_digest(self, command: ComputeDigest, send: Callable[[Any], None]) -> None:
        """Put the whole state together from this arena and its peers and hash it; tells DigestDone."""

        def work() -> None:
            try:
                digest = self._digest(command)
            except (ElasticError, OSError):
                digest = ""  # overwritten by a newer snapshot meanwhile: the report says "unknown"
            send(
                DigestDone(
                    slice_index=self._slice,
                    generation=command.generation,
                    step=command.step,
                    purpose=command.purpose,
                    digest=digest,
                )
            )

        threading.Thread(target=work, name="digest", daemon=True).start()

    def _digest(self, command: ComputeDigest) -> str:
        host = host_of(self._slice)
        source = self._arena.find_shards(command.step, command.of_generation)

        def get(transfer: Transfer) -> np.ndarray[Any, np.dtype[Any]]:
            if transfer.source == host:
                return source.read_piece(transfer.path, transfer.piece)
            (shard,) = fetch(
                command.addresses[transfer.source.slice_index],
                self._token,
                generation=command.generation,
                step=command.step,
                wants=[(transfer.path, transfer.piece)],
                deadline_s=FETCH_DEADLINE_S,
                of_generation=command.of_generation,
            )
            return np.asarray(shard.data)

        try:
            plan = Plan.of(command.step, command.transfers, bytes_lower_bound=0)
            buffers = execute_plan(plan, command.layout, host, get).buffers
        finally:
            source.close()
        shapes = {array.path: array for array in command.layout.arrays}
        return state_digest(
            (path, shapes[path].dtype, shapes[path].shape, buffer.reshape(-1).view(np.uint8))
            for (path, _), buffer in buffers.items()
        )


def _summary(manifest: Manifest, holdings: tuple[Holding, ...]) -> SnapshotSummary:
    return SnapshotSummary(
        step=manifest.step,
        generation=manifest.generation,
        layout=manifest.static.layout,
        holdings=holdings,
        position=manifest.position,
    )
