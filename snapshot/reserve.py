"""Making room in an arena without losing what it holds: which files are kept, grown or made anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reshard.errors import CorruptCopyError, UsageError
from snapshot.journal import JournalReader, allocate_journal, copy_journal
from snapshot.shm import PAGE_BYTES, align, grow_file, require_bytes
from snapshot.slot import SlotWriter, allocate_slot, empty_slot
from snapshot.slot_reader import SlotReader


def reserve_slots(paths: Sequence[Path], slot_bytes: int) -> None:
    """Make each of these slots at least `slot_bytes`; what they hold stays.

    Raises InsufficientMemoryError, before anything is touched if the room is clearly too small.
    """
    slot_bytes = align(slot_bytes, PAGE_BYTES)
    small = [path for path in paths if _size(path) < slot_bytes]
    if small:
        require_bytes(small[0].parent, sum(slot_bytes - _size(path) for path in small))
    for path in small:
        grow_slot(path, slot_bytes)
    for path in paths:
        _empty_if_damaged(path)


def grow_slot(path: Path, slot_bytes: int) -> None:
    """Make a slot, or make it larger in place, so that no room for a second one is needed meanwhile.

    What is no regular file is replaced. Raises InsufficientMemoryError, the slot as it was, and UsageError
    where it cannot be replaced.
    """
    try:
        grow_file(path, slot_bytes)
    except (FileNotFoundError, ValueError):
        allocate_slot(path, slot_bytes)
    except OSError as error:
        raise not_a_slot(path, error) from error


def not_a_slot(path: Path, error: Exception) -> UsageError:
    """Build the error for something else that has the name of a slot."""
    return UsageError(f"slot {path} cannot be used: {error}", remedy="Remove what was put in its place.")


def remove_unfinished(directory: Path) -> None:
    """Remove what an agent that was killed was making: files that never got their name keep their memory."""
    for path in directory.glob("*"):
        if path.name.endswith((".new", ".part")):
            path.unlink(missing_ok=True)


def reserve_journal(path: Path, record_bytes: int, num_records: int) -> None:
    """Make a journal of at least this size; one that exists keeps its records, unless it is damaged."""
    try:
        reader = JournalReader(path)
    except (FileNotFoundError, CorruptCopyError):
        allocate_journal(path, record_bytes=record_bytes, num_records=num_records)
        return
    kept_bytes, kept_records = reader.record_bytes, reader.num_records
    reader.close()
    if kept_bytes < record_bytes or kept_records < num_records:
        copy_journal(
            path, record_bytes=max(record_bytes, kept_bytes), num_records=max(num_records, kept_records)
        )


def keep_rank(writer: SlotWriter, step: int) -> tuple[int, int, int]:
    """Sort slots by what is lost when the snapshot of `step` overwrites them: the least first."""
    if not writer.is_complete:
        return 0, 0, 0
    generation, held_step = writer.order
    return (1 if held_step > step else 2), generation, held_step


def _empty_if_damaged(path: Path) -> None:
    """Mark a slot as empty whose header cannot be read: else it could count as the newest, and be kept."""
    try:
        with SlotReader(path) as reader:
            reader.read_manifest()
    except CorruptCopyError:
        empty_slot(path)


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
