"""What a host keeps in memory for other slices: two slots of its own, beside those of its worker.

The agent fills them, the worker never writes here. As with the worker's slots, the older is overwritten, and
one that is being filled holds nothing.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from snapshot.manifest import StaticManifest, encode_static
from snapshot.reserve import grow_slot, keep_rank, reserve_slots
from snapshot.shm import PAGE_BYTES
from snapshot.slot import SlotWriter, required_bytes
from snapshot.slot_header import HEADER_BYTES

BUDDY_PREFIX = "buddy"
NUM_SLOTS = 2


class BuddySlots:
    """The buddy slots in an arena's directory; for one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._paths = tuple(directory / f"{BUDDY_PREFIX}{index}" for index in range(NUM_SLOTS))
        self._writers: dict[Path, SlotWriter] = {}

    def reserve(self, slot_bytes: int) -> None:
        """Make room; what is large enough is kept, and so is the newest. Raises InsufficientMemoryError."""
        self.close()
        reserve_slots(self._paths, slot_bytes)

    def begin(self, static: StaticManifest, step: int) -> SlotWriter:
        """Return the slot to overwrite with the copies of `step`, ready to be filled and committed.

        One that is gone, cut short or too small is made anew or grows: captures wait for these copies, for
        ever if there is no place for them. Raises InsufficientMemoryError when that cannot be.
        """
        writers = {path: self._writer(path) for path in self._paths}
        chosen = min(self._paths, key=lambda path: _rank(writers[path], step))
        writer = writers[chosen]
        if writer is None or writer.capacity_bytes < required_bytes(static):
            self._forget(chosen)
            grow_slot(chosen, required_bytes(static))
            writer = self._writers[chosen] = SlotWriter(chosen)
        writer.prepare(static, encode_static(static))
        writer.begin()
        return writer

    def holds(self, generation: int, step: int) -> bool:
        """Tell whether the copies of a step are complete here."""
        writers = map(self._writer, self._paths)
        return any(writer is not None and writer.order == (generation, step) for writer in writers)

    def close(self) -> None:
        """Unmap them; the files stay."""
        for path in tuple(self._writers):
            self._forget(path)

    def _writer(self, path: Path) -> SlotWriter | None:
        """The mapping of the file that has this name now; None where there is no slot."""
        try:
            info = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            self._forget(path)
            return None
        known = self._writers.get(path)
        if known is not None and known.identity == (info.st_dev, info.st_ino, info.st_size):
            return known
        self._forget(path)
        if not stat.S_ISREG(info.st_mode) or info.st_size < HEADER_BYTES or info.st_size % PAGE_BYTES:
            return None
        writer = self._writers[path] = SlotWriter(path)
        return writer

    def _forget(self, path: Path) -> None:
        writer = self._writers.pop(path, None)
        if writer is not None:
            writer.close()


def _rank(writer: SlotWriter | None, step: int) -> tuple[int, int, int]:
    return (-1, 0, 0) if writer is None else keep_rank(writer, step)
