"""Reading boxes of a state at one step out of all the copies that one host has of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.boxes import (
    Box,
    BoxIndex,
    contains,
    format_box,
    intersect,
    relative_slices,
    shape_of,
    subtract,
    volume,
)
from reshard.errors import CorruptCopyError, MissingShardError
from reshard.execute import element_dtype
from reshard.ids import HostId
from reshard.layout import ArrayLayout
from snapshot.manifest import Manifest
from snapshot.slot_reader import SlotReader

Elements = npt.NDArray[Any]
StoredCopy = tuple[int, HostId, str, Box]
"""One copy of a box: (generation that captured it, host whose memory it is in, path, box)."""


@dataclass(frozen=True, slots=True)
class _Copy:
    reader: SlotReader
    index: int
    nbytes: int


class ShardSource:
    """The verified shards of one step in one arena: slots and stage together.

    Everything read is checked against its checksum; a damaged copy is passed over for another, and
    counted in `rejected`; those in `left_out` are not read. Elements are opaque values of the array's item
    size.
    """

    def __init__(
        self,
        step: int,
        readers: Iterable[tuple[SlotReader, Manifest]],
        left_out: Collection[StoredCopy] = (),
    ) -> None:
        self.step = step
        self.arrays: dict[str, ArrayLayout] = {}
        self.rejected: list[str] = []
        self.generation = 0
        self.position = 0
        self._readers: list[SlotReader] = []
        self._copies: defaultdict[str, dict[Box, list[_Copy]]] = defaultdict(dict)
        self._cache: tuple[str, dict[Box, Elements | None]] = ("", {})
        for reader, manifest in readers:
            self._add(reader, manifest, left_out)

    def boxes(self, path: str) -> tuple[Box, ...]:
        """Return the boxes of `path` that are stored, in order."""
        return tuple(sorted(self._copies.get(path, ())))

    def read(self, path: str, box: Box) -> Elements:
        """Return a private array with the elements of `box`, put together from stored shards.

        Raises MissingShardError, naming array and box, when a part of it is nowhere intact.
        """
        array = self.arrays.get(path)
        if array is None:
            raise MissingShardError(path, box, self.step)
        if volume(box) == 0:
            return np.empty(shape_of(box), element_dtype(array.itemsize))
        exact = self._shard(array, box) if box in self._copies[path] else None
        return self._assemble(array, box) if exact is None else exact

    def read_piece(self, path: str, box: Box) -> Elements:
        """Return the elements of `box`, in C order, cut out of one stored shard.

        Raises MissingShardError when no single shard has all of it.
        """
        array = self.arrays.get(path)
        holders = [
            stored
            for stored in self._copies.get(path, ())
            if len(stored) == len(box) and contains(stored, box)
        ]
        for stored in sorted(holders, key=volume):
            shard = self._shard(array, stored) if array is not None else None
            if shard is not None:
                return np.ascontiguousarray(shard[relative_slices(box, stored)])
        raise MissingShardError(path, box, self.step)

    def read_stored(self, path: str, box: Box, out: npt.NDArray[np.uint8]) -> bool:
        """Read one of the stored boxes (`boxes`) into `out`, C order, from the first copy that is intact.

        Return False when none is: `out` holds anything then. Several threads may read at once.
        """
        for copy in self._copies[path][box]:
            if copy.nbytes != len(out):
                self._reject(f"{copy.reader.path}: {path!r} has {copy.nbytes} bytes for {format_box(box)}")
                continue
            try:
                copy.reader.read_shard_into(copy.index, out)
            except CorruptCopyError as error:
                self._reject(error.message)
                continue
            return True
        return False

    def close(self) -> None:
        """Close the slots this source reads."""
        for reader in self._readers:
            reader.close()

    def _add(self, reader: SlotReader, manifest: Manifest, left_out: Collection[StoredCopy]) -> None:
        self._readers.append(reader)
        if manifest.generation >= self.generation:
            self.generation, self.position = manifest.generation, manifest.position
        self.arrays.update((array.path, array) for array in manifest.static.layout.arrays)
        source = manifest.generation, manifest.static.host
        for index, entry in enumerate(manifest.static.shards):
            if left_out and (*source, entry.path, entry.box) in left_out:
                continue
            self._copies[entry.path].setdefault(entry.box, []).append(_Copy(reader, index, entry.nbytes))

    def _shard(self, array: ArrayLayout, box: Box) -> Elements | None:
        """Return one stored shard from the first copy that is intact, None when none is."""
        if self._cache[0] != array.path:
            self._cache = (array.path, {})
        cached = self._cache[1]
        if box not in cached:
            cached[box] = self._read_first_intact(array, box)
        return cached[box]

    def _read_first_intact(self, array: ArrayLayout, box: Box) -> Elements | None:
        data = np.empty(array.box_nbytes(box), np.uint8)
        if not self.read_stored(array.path, box, data):
            return None
        return data.view(element_dtype(array.itemsize)).reshape(shape_of(box))

    def _reject(self, reason: str) -> None:
        if reason not in self.rejected:
            self.rejected.append(reason)

    def _assemble(self, array: ArrayLayout, box: Box) -> Elements:
        result = np.empty(shape_of(box), element_dtype(array.itemsize))
        missing: list[Box] = [box]
        for stored in BoxIndex(self._copies[array.path]).overlapping(box):
            wanted = [part for fragment in missing if (part := intersect(fragment, stored)) is not None]
            shard = self._shard(array, stored) if wanted else None
            if shard is None:
                continue
            for part in wanted:
                result[relative_slices(part, box)] = shard[relative_slices(part, stored)]
            missing = [rest for fragment in missing for rest in subtract(fragment, stored)]
        if missing:
            raise MissingShardError(array.path, sorted(missing)[0], self.step)
        return result
