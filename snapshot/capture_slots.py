"""The slots that a host's worker captures into: which one is overwritten next, and the mappings to do so."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from reshard.errors import UsageError
from snapshot.reserve import grow_slot, keep_rank, not_a_slot, reserve_slots
from snapshot.slot import SlotWriter, allocate_slot
from snapshot.slot_header import HEADER_BYTES

SLOT_PREFIX = "slot"
MIN_SLOTS = 2


class CaptureSlots:
    """The slots in an arena's directory, mapped when first written to; for one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[int, SlotWriter] = {}
        self._indexes: tuple[int, ...] = ()

    def paths(self) -> list[Path]:
        """Return the slot files that are there, by number."""
        return numbered_files(self._directory, SLOT_PREFIX)

    def reserve(self, slot_bytes: int, num_slots: int) -> None:
        """Make each slot at least `slot_bytes`; what it holds stays. Raises InsufficientMemoryError."""
        reserve_slots([self._directory / f"{SLOT_PREFIX}{index}" for index in range(num_slots)], slot_bytes)
        self._indexes = ()

    def for_write(self, slot_bytes: int, step: int) -> SlotWriter:
        """Return the slot to overwrite with the snapshot of `step`; see `Arena.slot_for_write`."""
        indexes = self._indexes or tuple(map(_index_of, self.paths()))
        if len(indexes) < MIN_SLOTS:
            raise UsageError(
                f"arena {self._directory} has {len(indexes)} slots", remedy="Call reserve first."
            )
        self._indexes = indexes
        chosen = min(indexes, key=lambda index: keep_rank(self._writer(index), step))
        if self._writer(chosen).capacity_bytes < slot_bytes:
            writer = self._writers.pop(chosen)
            writer.close()
            grow_slot(writer.path, slot_bytes)
        return self._writer(chosen)

    def map_all(self) -> None:
        """Map all slots for writing now, rather than at the first capture into each."""
        for path in self.paths():
            self._writer(_index_of(path))

    def discard_newer_than(self, step: int) -> None:
        """Empty the slots of later steps."""
        for path in self.paths():
            writer = self._writer(_index_of(path))
            if writer.is_complete and writer.order[1] > step:
                writer.discard()

    def close(self) -> None:
        """Unmap them; the files stay."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, index: int) -> SlotWriter:
        # At every capture: a plain string, without the cost of a Path.
        path = f"{self._directory}/{SLOT_PREFIX}{index}"
        try:
            info = os.stat(path)
        except FileNotFoundError:
            info = _make_anew(Path(path))
        if info.st_size < HEADER_BYTES and stat.S_ISREG(info.st_mode):
            info = _make_anew(Path(path))
        writer = self._writers.get(index)
        if writer is None or writer.identity != (info.st_dev, info.st_ino, info.st_size):
            if writer is not None:
                writer.close()
                del self._writers[index]
            try:
                writer = self._writers[index] = SlotWriter(Path(path))
            except (OSError, ValueError) as error:
                raise not_a_slot(Path(path), error) from error
        return writer


def _make_anew(path: Path) -> os.stat_result:
    """Make a slot that somebody removed or cut short, empty: it grows when it is written."""
    allocate_slot(path, HEADER_BYTES)
    return os.stat(path)


def numbered_files(directory: Path, prefix: str) -> list[Path]:
    """Return the files of a directory that are named by the prefix and a number, by number."""
    found = [path for path in directory.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(prefix)))


def _index_of(path: Path) -> int:
    return int(path.name.removeprefix(SLOT_PREFIX))
