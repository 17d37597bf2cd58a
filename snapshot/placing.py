"""Filling the boxes of devices from stored shards, with several threads.

Each shard is read, and its checksum checked, once, however many boxes need parts of it. An array goes to its
devices as soon as all its boxes are whole, a large one box by box. What is read passes through a few buffers
that are used again and again, so that only the memory of the device arrays themselves is fresh.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reshard.boxes import Box, BoxIndex, intersect, relative_slices, shape_of, subtract, volume
from reshard.execute import element_dtype
from reshard.write_counts import WriteCounts
from snapshot.copying import CopyTeam
from snapshot.scratch import Scratch
from snapshot.slot import Bytes

MAX_TOGETHER_BYTES = 64 << 20
"""Boxes of an array that take no more go to their devices in one call: each call costs as much as copying a
megabyte. They all wait in host memory for the last one, so what is larger goes box by box."""

Elements = npt.NDArray[Any]


class StoredBoxes(Protocol):
    """Where shards are read from; `snapshot.source.ShardSource` is one."""

    def boxes(self, path: str) -> tuple[Box, ...]:
        """Return the boxes of `path` that are stored."""
        ...

    def read_stored(self, path: str, box: Box, out: Bytes) -> bool:
        """Read a stored box into `out` and verify it; False if it cannot. From several threads at once."""
        ...


class Target(Protocol):
    """An array that is wanted; `snapshot.target_arrays.TargetArray` is one."""

    @property
    def path(self) -> str:
        """Its name in the state."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements; only their size matters here."""
        ...

    def missing(self) -> tuple[Box, ...]:
        """Return the boxes of it that are wanted."""
        ...

    def put(self, values: Mapping[Box, Elements]) -> None:
        """Take these boxes, opaque elements, out of memory that is used again. From several threads."""
        ...


@dataclass(eq=False, slots=True)
class _Group:
    """Boxes of one array that are put together; `num_missing` of them are not whole yet."""

    target: Target
    fillings: list[_Filling] = field(default_factory=list)
    num_missing: int = 0
    is_damaged: bool = False


@dataclass(eq=False, slots=True)
class _Filling:
    """A box of which `num_missing` pieces are still to come."""

    group: _Group
    box: Box
    num_missing: int
    counts: WriteCounts | None
    buffer: Bytes | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    """A stored shard, and the pieces of it that are wanted."""

    path: str
    box: Box
    itemsize: int
    pieces: tuple[tuple[_Filling, Box], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return volume(self.box) * self.itemsize


def place_boxes(
    targets: Iterable[Target], source: StoredBoxes, team: CopyTeam, *, count_writes: bool = False
) -> None:
    """Fill the missing boxes of each array from what `source` stores of it, and put them.

    A box of which a part is not stored, or nowhere intact in the shards chosen for it, stays missing, and so
    do those that would be put together with it: other shards may still have it. With `count_writes` raises
    `InvariantBrokenError` when an element of a box was not written exactly once.
    """
    readings = [reading for target in targets for reading in _plan(target, source, count_writes=count_writes)]
    placer = _Placer(source)
    team.for_each(placer.read, readings, sum(reading.nbytes for reading in readings))


def _plan(target: Target, source: StoredBoxes, *, count_writes: bool) -> list[_Reading]:
    """Choose the shards that the boxes of one array are put together from."""
    boxes, itemsize = target.missing(), target.dtype.itemsize
    stored = set(source.boxes(target.path))
    index = BoxIndex(stored)
    is_small = sum(map(volume, boxes)) * itemsize <= MAX_TOGETHER_BYTES
    together = _Group(target)
    pieces: defaultdict[Box, list[tuple[_Filling, Box]]] = defaultdict(list)
    for box in boxes:
        group = together if is_small else _Group(target)
        chosen = [(box, box)] if box in stored else _cover(box, index)
        if not chosen:
            group.is_damaged = True
            continue
        filling = _Filling(group, box, len(chosen), WriteCounts(target.path, box) if count_writes else None)
        group.fillings.append(filling)
        group.num_missing += 1
        for shard, piece in chosen:
            pieces[shard].append((filling, piece))
    return [_Reading(target.path, box, itemsize, tuple(pieces[box])) for box in sorted(pieces)]


def _cover(box: Box, stored: BoxIndex) -> list[tuple[Box, Box]]:
    """Return disjoint (stored box, piece of it) that make up `box`; none if they cannot."""
    chosen: list[tuple[Box, Box]] = []
    missing = [box] if volume(box) else []
    for candidate in stored.overlapping(box) if missing else ():
        wanted = [piece for rest in missing if (piece := intersect(rest, candidate)) is not None]
        chosen += [(candidate, piece) for piece in wanted]
        missing = [left for rest in missing for left in subtract(rest, candidate)]
    return [] if missing else chosen


class _Placer:
    """Does one reading after the other, in any thread."""

    def __init__(self, source: StoredBoxes) -> None:
        self._source = source
        self._scratch = Scratch()
        self._lock = threading.Lock()

    def read(self, reading: _Reading) -> None:
        shard = self._scratch.take(reading.nbytes)
        is_intact = self._source.read_stored(reading.path, reading.box, shard)
        same: _Filling | None = None
        for filling, piece in reading.pieces:
            if filling.box == reading.box:
                same = filling
                continue
            if is_intact:
                self._copy(shard, reading, filling, piece)
            self._count(filling, piece, is_intact=is_intact)
        if same is None:
            self._scratch.give_back(shard)
        else:  # the last to use the shard, as others may write to it afterwards
            same.buffer = shard
            self._count(same, same.box, is_intact=is_intact)

    def _copy(self, shard: Bytes, reading: _Reading, filling: _Filling, piece: Box) -> None:
        with self._lock:
            if filling.buffer is None:
                filling.buffer = self._scratch.take(volume(filling.box) * reading.itemsize)
        source = _elements(shard, reading.itemsize, reading.box)
        target = _elements(filling.buffer, reading.itemsize, filling.box)
        target[relative_slices(piece, filling.box)] = source[relative_slices(piece, reading.box)]

    def _count(self, filling: _Filling, piece: Box, *, is_intact: bool) -> None:
        """Note that a piece is there, or will not be, and put the group if that was the last one missing."""
        group = filling.group
        with self._lock:
            if filling.counts is not None and is_intact:
                filling.counts.add(piece)
            group.is_damaged |= not is_intact
            filling.num_missing -= 1
            group.num_missing -= filling.num_missing == 0
            is_last = filling.num_missing == group.num_missing == 0
        if is_last:
            self._finish(group)

    def _finish(self, group: _Group) -> None:
        if not group.is_damaged:
            itemsize = group.target.dtype.itemsize
            values: dict[Box, Elements] = {}
            for filling in group.fillings:
                if filling.counts is not None:
                    filling.counts.check_once()
                assert filling.buffer is not None
                values[filling.box] = _elements(filling.buffer, itemsize, filling.box)
            group.target.put(values)
        for filling in group.fillings:
            if filling.buffer is not None:
                self._scratch.give_back(filling.buffer)
                filling.buffer = None


def _elements(buffer: Bytes, itemsize: int, box: Box) -> Elements:
    return buffer.view(element_dtype(itemsize)).reshape(shape_of(box))
