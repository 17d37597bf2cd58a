"""What a host keeps in memory for other slices: two slots of its own, beside those of its worker.

The agent fills them, the worker never writes here. As with the worker's slots, the older is overwritten, and
one that is being filled holds nothing.
"""

from __future__ import annotations

from pathlib import Path

from reshard.errors import UsageError
from snapshot.manifest import StaticManifest, encode_static
from snapshot.reserve import grow_slot, keep_rank, reserve_slots
from snapshot.slot import SlotWriter, required_bytes

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

        Raises UsageError before `reserve`, InsufficientMemoryError when it has to grow and cannot.
        """
        if not all(path.exists() for path in self._paths):
            raise UsageError(f"no buddy slots in {self._paths[0].parent}", remedy="Call reserve first.")
        chosen = min(self._paths, key=lambda path: keep_rank(self._writer(path), step))
        if self._writer(chosen).capacity_bytes < required_bytes(static):
            self._writers.pop(chosen).close()
            grow_slot(chosen, required_bytes(static))
        writer = self._writer(chosen)
        writer.prepare(static, encode_static(static))
        writer.begin()
        return writer

    def holds(self, generation: int, step: int) -> bool:
        """Tell whether the copies of a step are complete here."""
        orders = [self._writer(path).order for path in self._paths if path.exists()]
        return (generation, step) in orders

    def close(self) -> None:
        """Unmap them; the files stay."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, path: Path) -> SlotWriter:
        if path not in self._writers:
            self._writers[path] = SlotWriter(path)
        return self._writers[path]
