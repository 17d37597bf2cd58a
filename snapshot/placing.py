"""Filling the boxes of devices from stored shards, with several threads.

Each shard is read, and its checksum checked, once, however many boxes need parts of it; a box goes to its
devices as soon as it is whole. What is read passes through a few buffers that are used again and again:
fresh memory costs far more than copying, so only that of the device arrays themselves is fresh.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from reshard.boxes import Box, BoxIndex, intersect, relative_slices, shape_of, subtract, volume
from reshard.execute import element_dtype
from snapshot.copying import CopyTeam

Bytes = npt.NDArray[np.uint8]

# JAX makes arrays from numpy memory that is aligned to 64 bytes without copying it, even if told not to
# (`may_alias=False` is for jax.Arrays only, JAX 0.10). So buffers begin in the middle of such a line.
_LINE_BYTES = 64
_OFFSET_BYTES = 32


class StoredBoxes(Protocol):
    """Where shards are read from; `snapshot.source.ShardSource` is one."""

    def boxes(self, path: str) -> tuple[Box, ...]:
        """Return the boxes of `path` that are stored."""
        ...

    def read_stored(self, path: str, box: Box, out: Bytes) -> bool:
        """Read a stored box into `out` and verify it; False if it cannot. From several threads at once."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class TargetBox:
    """A box of an array and the devices it belongs on; `arrays` are those made of it, in that order.

    `arrays` stays empty when a part of the box could not be read.
    """

    path: str
    box: Box
    dtype: np.dtype[Any]
    places: list[SingleDeviceSharding] = field(default_factory=list)
    arrays: list[jax.Array] = field(default_factory=list)
    buffer: Bytes | None = None
    num_missing: int = 0
    is_damaged: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return volume(self.box) * self.dtype.itemsize

    def elements(self, buffer: Bytes) -> npt.NDArray[Any]:
        """Return a buffer of the box's bytes as its elements, opaque."""
        return buffer.view(element_dtype(self.dtype.itemsize)).reshape(shape_of(self.box))

    def put(self, buffer: Bytes) -> None:
        """Make the device arrays of a buffer, which is free again when this returns."""
        value = self.elements(buffer).view(self.dtype)
        first, last = buffer.ctypes.data, buffer.ctypes.data + len(buffer)
        arrays = [jax.device_put(value, place) for place in self.places]
        for index, array in enumerate(jax.block_until_ready(arrays)):
            on_cpu = next(iter(array.devices())).platform == "cpu"
            if on_cpu and array.nbytes and first <= array.unsafe_buffer_pointer() < last:
                copied = jax.device_put(array, self.places[index], may_alias=False)
                arrays[index] = jax.block_until_ready(copied)
        self.arrays = arrays


@dataclass(frozen=True, slots=True)
class _Reading:
    """A stored shard, and the pieces of it that are wanted."""

    path: str
    box: Box
    nbytes: int
    pieces: tuple[tuple[TargetBox, Box], ...]


def place_boxes(leaves: Iterable[Sequence[TargetBox]], source: StoredBoxes, team: CopyTeam) -> None:
    """Fill the boxes of each leaf from what `source` stores of it.

    A box of which a part is not stored, or nowhere intact in the shards chosen for it, is left without
    arrays: other shards may still have it.
    """
    readings = [reading for targets in leaves for reading in _plan_leaf(targets, source)]
    placer = _Placer(source)
    team.for_each(placer.read, readings, sum(reading.nbytes for reading in readings))


def _plan_leaf(targets: Sequence[TargetBox], source: StoredBoxes) -> list[_Reading]:
    """Choose the shards that the boxes of one array are put together from."""
    if not targets:
        return []
    stored = set(source.boxes(targets[0].path))
    index = BoxIndex(stored)
    pieces: defaultdict[Box, list[tuple[TargetBox, Box]]] = defaultdict(list)
    for target in targets:
        chosen = [(target.box, target.box)] if target.box in stored else _cover(target.box, index)
        target.num_missing = len(chosen)
        for box, piece in chosen:
            pieces[box].append((target, piece))
    path, itemsize = targets[0].path, targets[0].dtype.itemsize
    return [_Reading(path, box, volume(box) * itemsize, tuple(pieces[box])) for box in sorted(pieces)]


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
        self._scratch = _Scratch()
        self._lock = threading.Lock()
        config: Any = jax.config  # lacks the name for type checkers
        self._enable_x64 = bool(config.jax_enable_x64)  # may hold in the calling thread only

    def read(self, reading: _Reading) -> None:
        shard = self._scratch.take(reading.nbytes)
        intact = self._source.read_stored(reading.path, reading.box, shard)
        for target, piece in reading.pieces:
            if intact and target.box == reading.box:
                self._put(target, shard)
            else:
                self._add(target, piece, reading, shard if intact else None)
        self._scratch.give_back(shard)

    def _add(self, target: TargetBox, piece: Box, reading: _Reading, shard: Bytes | None) -> None:
        """Copy a piece into its box, and place the box if that was the last one missing."""
        with self._lock:
            if target.buffer is None:
                target.buffer = self._scratch.take(target.nbytes)
            buffer = target.buffer
        if shard is not None:
            elements = shard.view(element_dtype(target.dtype.itemsize)).reshape(shape_of(reading.box))
            where = relative_slices(piece, target.box)
            target.elements(buffer)[where] = elements[relative_slices(piece, reading.box)]
        with self._lock:
            target.is_damaged |= shard is None
            target.num_missing -= 1
            is_last = target.num_missing == 0
        if is_last:
            if not target.is_damaged:
                self._put(target, buffer)
            target.buffer = None
            self._scratch.give_back(buffer)

    def _put(self, target: TargetBox, buffer: Bytes) -> None:
        with jax.enable_x64(self._enable_x64):
            target.put(buffer)


class _Scratch:
    """Buffers that are used again; for any thread."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Return a buffer of `nbytes`, its content anything, that JAX cannot make an array of in place."""
        with self._lock:
            fitting = [raw for raw in self._free if len(raw) >= nbytes + _LINE_BYTES]
            raw = min(fitting, key=len, default=None)
            if raw is not None:
                self._free = [other for other in self._free if other is not raw]
            elif self._free:
                self._free.pop()  # too small: its room is better used for the new one
        if raw is None:
            raw = np.empty(nbytes + _LINE_BYTES, np.uint8)
        start = (_OFFSET_BYTES - raw.ctypes.data) % _LINE_BYTES
        return raw[start : start + nbytes]

    def give_back(self, buffer: Bytes) -> None:
        """Take back what `take` gave, from who is done with it."""
        with self._lock:
            self._free.append(cast("Bytes", buffer.base))
