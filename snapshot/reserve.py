"""Making room in an arena without losing what it holds: which files are kept, grown or made anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reshard.errors import CorruptCopyError, InsufficientMemoryError
from snapshot.contents import newest_slot
from snapshot.journal import JournalReader, allocate_journal, copy_journal
from snapshot.shm import PAGE_BYTES, align, available_bytes, require_bytes
from snapshot.slot import SlotWriter, allocate_slot


def reserve_slots(paths: Sequence[Path], slot_bytes: int) -> None:
    """Make each of these slots at least `slot_bytes`, but never touch the newest complete one.

    Raises InsufficientMemoryError, before anything is touched if the room is clearly too small.
    """
    slot_bytes = align(slot_bytes, PAGE_BYTES)
    newest = newest_slot(paths)
    small = [path for path in paths if path != newest and _size(path) < slot_bytes]
    if small:
        require_bytes(small[0].parent, sum(slot_bytes - _size(path) for path in small))
    for path in small:
        replace_slot(path, slot_bytes)


def replace_slot(path: Path, slot_bytes: int) -> None:
    """Make a slot anew with another size; what it holds is lost. Raises InsufficientMemoryError."""
    try:
        allocate_slot(path, slot_bytes)
    except InsufficientMemoryError:
        if not path.exists() or slot_bytes > available_bytes(path.parent) + _size(path):
            raise
        path.unlink()  # not the newest snapshot; its room is needed for its own successor
        allocate_slot(path, slot_bytes)


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


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
