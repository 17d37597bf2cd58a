"""The columns of a plan: what goes from where to where, for thousands of hosts and arrays.

A row is one piece of a box, for a range of arrays that are partitioned and held alike. Rows are turned into
`Transfer` values, one for each array, only where somebody wants to carry them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from reshard.boxes import Box
from reshard.errors import UsageError
from reshard.grid import BoxTable, Column, Edges, num_elements
from reshard.holdings import TIERS
from reshard.ids import HostId
from reshard.layout import MOST_BYTES
from reshard.transfer import Transfer

MIN_LENGTH_TO_CUT = 16
"""The first dim of this length is cut, so that parts stay contiguous; without one, the longest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayClass:
    """Arrays of one shape and itemsize in bytes, with the common edges of all their boxes."""

    paths: tuple[str, ...]
    itemsize: int
    edges: Edges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The columns of a `PlanGroup`, `[n]` each.

    `target` and `source` are indices into the plan's hosts, `tier` one into `TIERS`, `piece`, `target_box`
    and `source_box` into the group's boxes; the row is for the group's arrays `first` to `stop`. With
    `cut_stop` above zero it is a part of the piece, for one array: the elements `cut_start` to `cut_stop`,
    counted from where the piece begins, of its first dim of at least `MIN_LENGTH_TO_CUT`, or of the longest.
    """

    target: Column
    source: Column
    tier: Column
    piece: Column
    target_box: Column
    source_box: Column
    first: Column
    stop: Column
    cut_start: Column
    cut_stop: Column

    def columns(self) -> dict[str, Column]:
        """Return the columns by name."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    def is_local(self) -> NDArray[np.bool_]:
        """Return which rows stay on their host, `[n]`."""
        same: NDArray[np.bool_] = self.source == self.target
        return same


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanGroup:
    """The rows of arrays that are partitioned and held alike; arrays are numbered through the classes.

    `boxes` are in the numbers of each class's edges. Raises `UsageError` when a row moves nothing;
    `check_rows` looks closer, at what comes from outside.
    """

    classes: tuple[ArrayClass, ...]
    boxes: BoxTable
    rows: Rows
    nbytes: Column = field(init=False)
    """Bytes of each row, over all its arrays: `[n]`."""

    def __post_init__(self) -> None:
        nbytes = np.zeros(len(self.rows.target), np.int64)
        for begin, of_class in self.numbered_classes():
            end = begin + len(of_class.paths)
            num_arrays = np.clip(
                np.minimum(self.rows.stop, end) - np.maximum(self.rows.first, begin), 0, None
            )
            nbytes += num_arrays * self.elements(begin, of_class) * of_class.itemsize
        if (nbytes < 1).any():
            raise UsageError("a row of the plan moves nothing")
        object.__setattr__(self, "nbytes", nbytes)

    def numbered_classes(self) -> Iterator[tuple[int, ArrayClass]]:
        """Yield each class with the number of its first array."""
        begins = accumulate((len(of_class.paths) for of_class in self.classes), initial=0)
        yield from zip(begins, self.classes, strict=False)

    def elements(self, begin: int, of_class: ArrayClass) -> Column:
        """Return the elements that each row moves of one array of the class that begins there, `[n]`."""
        rows = self.rows
        elements = num_elements(of_class.edges, self.boxes.low, self.boxes.high)[rows.piece]
        end = begin + len(of_class.paths)
        cut = np.flatnonzero((rows.cut_stop > 0) & (rows.first >= begin) & (rows.first < end))
        if len(cut):
            length = self._cut_lengths(of_class, rows.piece[cut])
            part = rows.cut_stop[cut] - rows.cut_start[cut]
            if (part < 1).any() or (rows.cut_stop[cut] > length).any():
                raise UsageError("a row of the plan is cut outside its piece")
            elements[cut] = elements[cut] // length * part
        return elements

    def is_reused(self) -> NDArray[np.bool_]:
        """Return which rows need no copy: the target has the very box it needs, `[n]`."""
        low, high = self.boxes.low, self.boxes.high
        reused: NDArray[np.bool_] = self.rows.is_local() & (self.rows.cut_stop == 0)
        local = np.flatnonzero(reused)
        target_box = self.rows.target_box[local]
        for box in (self.rows.source_box[local], self.rows.piece[local]):
            same = (low[box] == low[target_box]).all(axis=1) & (high[box] == high[target_box]).all(axis=1)
            reused[local] &= same
        return reused

    def transfers(self, numbers: Column, hosts: Sequence[HostId]) -> Iterator[Transfer]:
        """Yield the transfers of the rows with these numbers."""
        rows = self.rows
        for begin, of_class in self.numbered_classes():
            end = begin + len(of_class.paths)
            for row in numbers[(rows.first[numbers] < end) & (rows.stop[numbers] > begin)].tolist():
                whole, target_box, source_box = (
                    self._box(of_class, int(column[row]))
                    for column in (rows.piece, rows.target_box, rows.source_box)
                )
                piece = cut_box(whole, int(rows.cut_start[row]), int(rows.cut_stop[row]))
                elements = int(np.prod([stop - start for start, stop in piece], dtype=np.int64))
                for array in range(max(begin, int(rows.first[row])), min(end, int(rows.stop[row]))):
                    yield Transfer(
                        path=of_class.paths[array - begin],
                        source=hosts[rows.source[row]],
                        target=hosts[rows.target[row]],
                        source_box=source_box,
                        piece=piece,
                        target_box=target_box,
                        nbytes=elements * of_class.itemsize,
                        tier=TIERS[rows.tier[row]],
                    )

    def _cut_lengths(self, of_class: ArrayClass, boxes: Column) -> Column:
        low, high = self.boxes.low[boxes], self.boxes.high[boxes]
        edges = enumerate(of_class.edges)
        lengths = np.stack([along[high[:, dim]] - along[low[:, dim]] for dim, along in edges], axis=1)
        return np.array([row[cut_dim(row)] for row in lengths.tolist()], np.int64)

    def _box(self, of_class: ArrayClass, box: int) -> Box:
        low, high = self.boxes.low[box].tolist(), self.boxes.high[box].tolist()
        edges = zip(of_class.edges, low, high, strict=True)
        return tuple((int(along[start]), int(along[stop])) for along, start, stop in edges)


def check_rows(classes: Sequence[ArrayClass], boxes: BoxTable, rows: Rows) -> None:
    """Raise `UsageError` when a row's index is out of range or its piece not inside both boxes.

    So are edges that do not ascend, and boxes that are not between them.
    """
    low, high = boxes.low, boxes.high
    for of_class in classes:
        _check_class(of_class, boxes)
    if len({len(column) for column in rows.columns().values()}) > 1:
        raise UsageError("the rows of the plan have columns of different lengths")
    if not all(column.min(initial=0) >= 0 for column in rows.columns().values()):
        raise UsageError("a row of the plan has a number below zero")
    numbers = (rows.piece, rows.target_box, rows.source_box)
    num_arrays = sum(len(of_class.paths) for of_class in classes)
    if max(column.max(initial=-1) for column in numbers) >= len(low):
        raise UsageError("a row of the plan names a box that the plan does not have")
    if (rows.first >= rows.stop).any() or rows.stop.max(initial=0) > num_arrays:
        raise UsageError("a row of the plan has no arrays, or some that the plan does not have")
    if rows.tier.max(initial=0) >= len(TIERS):
        raise UsageError("a row of the plan has an unknown tier")
    for outer in (rows.target_box, rows.source_box):
        if (low[outer] > low[rows.piece]).any() or (high[rows.piece] > high[outer]).any():
            raise UsageError("a piece of the plan is not inside both boxes")


def _check_class(of_class: ArrayClass, boxes: BoxTable) -> None:
    edges = of_class.edges
    if of_class.itemsize < 1 or not of_class.paths or len(edges) != boxes.low.shape[1]:
        raise UsageError("the plan has arrays without names or bytes, or of another rank than their boxes")
    if any((along[:1] < 0).any() or (np.diff(along) <= 0).any() for along in edges):
        raise UsageError(f"the edges of {of_class.paths[0]!r} in the plan do not ascend from zero or more")
    if math.prod([int(along[-1]) for along in edges if len(along)]) * of_class.itemsize > MOST_BYTES:
        raise UsageError(f"{of_class.paths[0]!r} in the plan has more bytes than can be counted")
    num_edges = np.array([len(along) for along in edges], np.int64)
    if (boxes.low < 0).any() or (boxes.low > boxes.high).any() or (boxes.high >= num_edges).any():
        raise UsageError(f"the plan has a box that is not between the edges of {of_class.paths[0]!r}")


def cut_dim(lengths: Sequence[int]) -> int:
    """Return the dim along which a piece with these lengths is cut; needs at least one."""
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    return next((dim for dim, length in enumerate(lengths) if length >= MIN_LENGTH_TO_CUT), longest)


def cut_box(piece: Box, cut_start: int, cut_stop: int) -> Box:
    """Return the part of the piece that a row with this cut is for; all of it with `cut_stop` zero."""
    if not cut_stop:
        return piece
    dim = cut_dim([stop - start for start, stop in piece])
    start = piece[dim][0]
    return (*piece[:dim], (start + cut_start, start + cut_stop), *piece[dim + 1 :])
