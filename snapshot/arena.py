"""The arena: all files of one host of one job in host memory.

Owned by the agent, which creates, verifies, serves and removes them; the worker writes slots and journal
through its own mappings. It outlives the worker, and the agent too: another agent attaches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from reshard.boxes import Box
from reshard.errors import CorruptCopyError, UsageError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.buddy_slots import BUDDY_PREFIX
from snapshot.capture_slots import MIN_SLOTS, CaptureSlots, numbered_files
from snapshot.contents import (
    ArenaContents,
    VerifiedHoldings,
    VerifiedSnapshots,
    open_source,
    read_contents,
    verify_contents,
    verify_snapshots,
)
from snapshot.job import (
    DEFAULT_ROOT,
    LOCK_NAME,
    LOCK_TIMEOUT_S,
    job_directory,
    lock_in_directory,
    remove_host_files,
    remove_job_if_unused,
)
from snapshot.journal import Journal, JournalReader
from snapshot.manifest import Manifest, make_static
from snapshot.pin import PINNED_NAME, pin_snapshot
from snapshot.reserve import remove_unfinished, reserve_journal
from snapshot.shm import FileLock, check_root
from snapshot.slot import Bytes, SlotWriter, write_slot
from snapshot.slot_reader import SlotReader
from snapshot.source import ShardSource
from snapshot.stage import StageWriter

STAGE_NAME = "stage"
JOURNAL_NAME = "journal"


class Arena:
    """One host's snapshot memory; holds the host's shared lock until `close`.

    Not for use by several threads at once, except `manifests`, `verified_holdings`, `find_shards`,
    `find_captured`, `slot_files` and `journal_reader`, which only read, and `stage_writer`.
    """

    def __init__(self, directory: Path, host: HostId, lock: FileLock) -> None:
        self.directory = directory
        self.host = host
        self._lock = lock
        self._slots = CaptureSlots(directory)
        self._journal: Journal | None = None

    @classmethod
    def create(cls, job_id: str, host: HostId, *, root: Path = DEFAULT_ROOT) -> Arena:
        """Make the host's directory (one that exists is kept with its content) and lock it.

        Raises UsageError when `root` cannot be used.
        """
        check_root(root)
        job = job_directory(root, job_id)
        lock = lock_in_directory(job / str(host), shared=True, parents=(job,))
        if lock is None:
            raise UsageError(f"arena {job / str(host)} is being removed by another process")
        return cls(job / str(host), host, lock)

    @classmethod
    def attach(cls, job_id: str, host: HostId, *, root: Path = DEFAULT_ROOT) -> Arena:
        """Lock an arena that exists: a worker, or an agent that takes over from a dead one.

        Raises UsageError when there is none.
        """
        directory = job_directory(root, job_id) / str(host)
        lock = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            lock = FileLock.acquire(directory / LOCK_NAME, shared=True, timeout_s=LOCK_TIMEOUT_S)
        if lock is None:
            raise UsageError(f"no arena at {directory}", remedy="Its agent must create it first.")
        return cls(directory, host, lock)

    def reserve(
        self,
        slot_bytes: int,
        *,
        num_slots: int = MIN_SLOTS,
        journal_record_bytes: int = 0,
        journal_records: int = 0,
    ) -> None:
        """Make room for `num_slots` slots of `slot_bytes` and for the journal.

        What is large enough is kept; smaller slots grow and keep their content, and so does the journal.
        What an agent that was killed left unfinished goes. For the agent. Raises InsufficientMemoryError,
        InsufficientMemoryError.fields saying how much is needed, before anything is touched if the room is
        clearly too small.
        """
        if num_slots < MIN_SLOTS:
            raise UsageError(f"{num_slots} slots: at least {MIN_SLOTS} are needed to keep one complete")
        remove_unfinished(self.directory)
        self._slots.reserve(slot_bytes, num_slots)
        if journal_records:
            reserve_journal(self.directory / JOURNAL_NAME, journal_record_bytes, journal_records)

    def manifests(self) -> ArenaContents:
        """Return the manifests of all complete snapshots, stage included; shard bytes are not read."""
        return read_contents(self.slot_files())

    def captured(self) -> ArenaContents:
        """Return the manifests of the complete snapshots that this host's worker captured."""
        return read_contents(self._slots.paths())

    def verified_holdings(self, step: int | None = None) -> VerifiedHoldings:
        """Return the holdings (of one step, or of all) whose bytes were read and match their checksum."""
        return verify_contents(self.slot_files(), step)

    def verified_snapshots(self) -> VerifiedSnapshots:
        """Return the snapshots in the slots with their intact shards; what is staged is no snapshot."""
        return verify_snapshots(self.captured_files())

    def find_shards(self, step: int, generation: int | None = None) -> ShardSource:
        """Return a reader of everything held of `step` (captured in `generation`, if given); close it."""
        generations = None if generation is None else (generation,)
        return open_source(self.slot_files(), step, generations)

    def find_captured(self, step: int, generation: int) -> ShardSource:
        """Return a reader of what workers captured of `step` in `generation`, without the stage; close it.

        What was fetched for a restore is staged under the step and generation that the restored state is
        captured under again: it says nothing about what the devices hold.
        """
        return open_source(self.captured_files(), step, (generation,))

    def slot_files(self) -> tuple[Path, ...]:
        """Return the files that may hold a snapshot: the slots, those for other slices, then the stage."""
        return *self.captured_files(), self.directory / STAGE_NAME

    def captured_files(self) -> tuple[Path, ...]:
        """Return the files that may hold what workers captured: the slots, and those for other slices."""
        return *self._slots.paths(), *numbered_files(self.directory, BUDDY_PREFIX)

    def slot_for_write(self, slot_bytes: int, step: int) -> SlotWriter:
        """Return the slot to overwrite with the snapshot of `step`, grown if it is too small.

        An empty one, else one of a later step (the job went another way since, from an older step), else
        the oldest: one of this very step is kept while there is an older one, so that capturing a restored
        state again never touches the copy it came from. Raises UsageError before `reserve`, and
        InsufficientMemoryError.
        """
        return self._slots.for_write(slot_bytes, step)

    def map_slots(self) -> None:
        """Map all slots for writing now, rather than at the first capture into each."""
        self._slots.map_all()

    def discard_newer_than(self, step: int) -> None:
        """Empty the slots of later steps: the job was restored from `step` and goes another way.

        Each survivor does so before its first step of the new generation. Else a second loss could mix
        shards of both ways.
        """
        self._slots.discard_newer_than(step)
        with (
            contextlib.suppress(OSError, CorruptCopyError),
            SlotReader(self.directory / STAGE_NAME) as reader,
        ):
            staged = reader.read_manifest()
            if staged is not None and staged.step > step:
                self.drop_stage()

    def write_stage(
        self,
        layout: Layout,
        shards: Sequence[tuple[str, Box, Bytes | bytes | memoryview]],
        *,
        step: int,
        generation: int,
        position: int,
    ) -> Manifest:
        """Store shards fetched from peers, in place of what was staged before.

        `layout` is that of the snapshot they come from; boxes may be pieces of its boxes.
        """
        static = make_static(self.host, layout, [(path, box) for path, box, _ in shards])
        data = [payload for _, _, payload in shards]
        path = self.directory / STAGE_NAME
        return write_slot(path, static, data, step=step, generation=generation, position=position)

    def stage_writer(self, layout: Layout, shards: Sequence[tuple[str, Box]]) -> StageWriter:
        """Return a new stage to be filled in place and committed; what is staged now stays until then.

        `layout` and boxes are as for `write_stage`. Raises InsufficientMemoryError. For use by several
        threads.
        """
        return StageWriter(self.directory / STAGE_NAME, self.host, layout, shards)

    def drop_stage(self) -> None:
        """Remove the staged shards, if any."""
        (self.directory / STAGE_NAME).unlink(missing_ok=True)

    def pin(self, step: int, generation: int) -> Path | None:
        """Copy a snapshot out of its slot into a file that no capture overwrites; None when it is gone.

        One at a time, in any thread; replaces what was pinned before. Raises as `snapshot.pin.pin_snapshot`.
        """
        return pin_snapshot(self._slots.paths(), self.directory / PINNED_NAME, step, generation)

    def unpin(self) -> None:
        """Remove the pinned snapshot, if any."""
        (self.directory / PINNED_NAME).unlink(missing_ok=True)

    def journal(self) -> Journal:
        """Return the journal for appending (the worker). Raises UsageError before `reserve`."""
        if self._journal is None:
            self._require_journal()
            self._journal = Journal(self.directory / JOURNAL_NAME)
        return self._journal

    def journal_reader(self) -> JournalReader:
        """Return a reader of the journal; close it. Raises UsageError before `reserve`."""
        self._require_journal()
        return JournalReader(self.directory / JOURNAL_NAME)

    def close(self) -> None:
        """Unmap everything and give the lock back; the files stay."""
        self._slots.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._lock.release()

    def unlink(self) -> None:
        """Remove all files of this host and close; for the agent, at the end of the job.

        The job's directory goes with its last host, unless a launcher holds it.
        """
        remove_host_files(self.directory)
        self.close()
        remove_job_if_unused(self.directory.parent)

    def _require_journal(self) -> None:
        if not (self.directory / JOURNAL_NAME).exists():
            raise UsageError(f"arena {self.directory} has no journal", remedy="Reserve one first.")
