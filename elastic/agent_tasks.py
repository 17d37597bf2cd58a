"""What an agent does with its arena: verify snapshots, fill the stage, compute digests, read journals."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elastic.agent_digest import digest_from_memory
from elastic.agent_fetch import Fetch, PieceFetcher, check_staged, wanted_pieces
from elastic.events import (
    ComputeDigest,
    DigestDone,
    SnapshotSummary,
    Stage,
    Staged,
    StagePersisted,
)
from elastic.members import host_of
from elastic.persistent_reads import digest_from_disk, stage_from_disk
from elastic.protocol import WorkerCommitted
from elastic.records import StepCommitted
from reshard.errors import ElasticError, InvariantBrokenError, UsageError
from reshard.holdings import Holding, Tier
from snapshot.arena import Arena
from snapshot.dataplane import TlsFiles
from snapshot.journal import JournalReader, JournalRecord
from snapshot.manifest import Manifest

C = TypeVar("C", Stage, StagePersisted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What an arena holds, verified while the host was fenced off from what is older than `generation`."""

    generation: int
    snapshots: tuple[SnapshotSummary, ...]
    rejected: tuple[str, ...]


class ArenaTasks:
    """The arena work of one agent. What takes long runs in threads, which tell their result.

    Peers' memory is read through `fetch`; without one, over the data plane with the job's `token`. With
    `count_writes` it counts that what is fetched is each missing element exactly once.
    """

    def __init__(
        self,
        arena: Arena,
        member: int,
        token: str = "",
        *,
        fetch: Fetch | None = None,
        tls: TlsFiles | None = None,
        persist_root: Path | None = None,
        count_writes: bool = False,
        hosts_per_slice: int = 1,
    ) -> None:
        self._arena = arena
        self._member = member
        self._host = host_of(member, hosts_per_slice)
        self._hosts_per_slice = hosts_per_slice
        self._pieces = PieceFetcher(
            arena, self._host, token, fetch=fetch, tls=tls, hosts_per_slice=hosts_per_slice
        )
        self._persist_root = persist_root
        self._count_writes = count_writes
        self._journal: JournalReader | None = None
        self._staged_bytes = 0
        self._rejected: tuple[str, ...] = ()
        self._staged_tier: Tier = "peer"

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
        """The snapshot of one step and generation that the worker captured, as it says it is (its bytes are
        verified when they are used).
        """
        for manifest in self._arena.captured().complete:
            if (manifest.step, manifest.generation) == (step, generation):
                return _summary(manifest, manifest.holdings())
        return None

    def committed_record(self, message: WorkerCommitted) -> StepCommitted:
        """The record of a committed step, with the samples as this host's journal has them (none, without an
        entry: what was consumed is then unknown).
        """
        entry = self._journal_entry(message) or self._journal_entry(message, reopen=True)
        ids = tuple(int(sample) for sample in entry.sample_ids) if entry else ()
        return StepCommitted(
            unix_s=time.time(),
            generation=message.generation,
            slice_index=self._host.slice_index,
            host_index=self._host.host_index,
            step=message.step,
            position=entry.position - len(ids) if entry else 0,
            sample_ids=ids,
            loss=message.loss,
            step_s=message.step_s,
            stall_s=message.stall_s,
            captured_bytes=message.captured_bytes,
            compile_s=message.compile_s,
            cache_hits=message.cache_hits,
            cache_misses=message.cache_misses,
            skipped=message.skipped,
            interval_steps=message.interval_steps,
            host_s=message.host_s,
            device_s=message.device_s,
            loss_is_finite=message.loss is None or math.isfinite(message.loss),
        )

    def _journal_entry(self, message: WorkerCommitted, *, reopen: bool = False) -> JournalRecord | None:
        """The newest entry of the step; `reopen` when the journal may have grown into another file."""
        if reopen and self._journal is not None:
            self._journal.close()
            self._journal = None
        try:
            if self._journal is None:
                self._journal = self._arena.journal_reader()
            return self._journal.find(message.step, message.generation)
        except (ElasticError, OSError):  # damaged: what the step used is then not known
            return None

    def bytes_from(self, restored: dict[str, int]) -> dict[str, int]:
        """What a worker read for its restore, by tier: what this agent had staged came from elsewhere."""
        staged = min(self._staged_bytes, restored.get("shm", 0))
        self._staged_bytes = 0
        return {"shm": restored.get("shm", 0) - staged, self._staged_tier: staged}

    def stage(self, command: Stage, generation: Callable[[], int], send: Callable[[Any], None]) -> None:
        """Fetch what the plan gives this host; tells Staged, unless `generation` has moved on meanwhile."""
        work = partial(self._stage_and_tell, command, self.stage_now, generation, send)
        if command.transfers:
            threading.Thread(target=work, name="stage", daemon=True).start()
        else:
            work()

    def stage_persisted(
        self, command: StagePersisted, generation: Callable[[], int], send: Callable[[Any], None]
    ) -> None:
        """Read this host's boxes from the persistent tier; tells Staged as `stage` does."""
        work = partial(self._stage_and_tell, command, self.stage_persisted_now, generation, send)
        threading.Thread(target=work, name="stage", daemon=True).start()

    def _stage_and_tell(
        self,
        command: C,
        stage: Callable[[C], None],
        generation: Callable[[], int],
        send: Callable[[Any], None],
    ) -> None:
        error = ""
        try:
            stage(command)
        except (ElasticError, OSError) as failed:
            error = str(failed)
        if command.generation == generation():
            rejected, self._rejected = self._rejected, ()
            send(
                Staged(
                    member=self._member,
                    generation=command.generation,
                    error=error,
                    rejected=rejected,
                )
            )

    def stage_persisted_now(self, command: StagePersisted) -> None:
        """Read this host's boxes from the persistent tier into its stage.

        Raises ElasticError or OSError when it cannot.
        """
        self._staged_bytes = 0
        if self._persist_root is None:
            raise UsageError("this job has no persistent tier")
        self._staged_bytes = stage_from_disk(self._arena, self._persist_root, command)
        self._staged_tier = "persistent"

    def stage_now(self, command: Stage) -> None:
        """Fetch what the plan gives this host into its stage, in place of what was staged before.

        Raises ElasticError or OSError when it cannot.
        """
        self._staged_bytes = 0
        if not command.transfers:
            self._arena.drop_stage()
            return
        pieces = wanted_pieces(command.transfers, command.alternates, self._hosts_per_slice)
        with self._arena.stage_writer(command.layout, list(pieces)) as stage:
            filled = self._pieces.fill(command, pieces, stage.shard_views)
            if self._count_writes:
                check_staged(command, list(pieces), self._arena)
            staged_bytes = sum(view.nbytes for view in stage.shard_views)
            stage.commit(
                step=command.step,
                generation=command.generation,
                position=command.position,
                checksums=filled.checksums,
            )
        self._staged_bytes, self._staged_tier, self._rejected = staged_bytes, "peer", filled.rejected

    def compute_digest(self, command: ComputeDigest, send: Callable[[Any], None]) -> None:
        """Put the whole state together from this arena and its peers and hash it; tells DigestDone."""
        threading.Thread(target=lambda: send(self.digest_now(command)), name="digest", daemon=True).start()

    def digest_now(self, command: ComputeDigest) -> DigestDone:
        """Put the whole state together from this arena and its peers and hash it."""
        try:
            digest = self._digest(command)
        except InvariantBrokenError as broken:
            digest = (
                f"{command.purpose} state: {broken.message}"  # equal to no other: the report says "broken"
            )
        except (ElasticError, OSError):
            digest = ""  # overwritten by a newer snapshot meanwhile: the report says "unknown"
        return DigestDone(
            member=self._member,
            generation=command.generation,
            step=command.step,
            purpose=command.purpose,
            digest=digest,
        )

    def _digest(self, command: ComputeDigest) -> str:
        if command.is_persisted and self._persist_root is not None:
            return digest_from_disk(self._persist_root, command)
        return digest_from_memory(command, self._host, self._pieces, count_writes=self._count_writes)


def _summary(manifest: Manifest, holdings: tuple[Holding, ...]) -> SnapshotSummary:
    return SnapshotSummary(
        step=manifest.step,
        generation=manifest.generation,
        layout=manifest.static.layout,
        holdings=holdings,
        position=manifest.position,
    )
