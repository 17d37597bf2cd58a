"""Arrays that are partitioned and held alike, whose plan is worked out once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from reshard.grid import Column, num_elements
from reshard.matching import Match
from reshard.plan_rows import ArrayClass, cut_dim


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stacked:
    """All classes of a pattern: by dim their edges `[num_classes, num_edges]`, and `[num_classes]` each."""

    edges: tuple[Column, ...]
    itemsize: Column
    num_arrays: Column
    first: Column


@dataclass(slots=True, eq=False)
class Pattern:
    """Arrays that are partitioned and held alike, what each host needs of them, and from where."""

    match: Match
    classes: list[ArrayClass] = field(default_factory=list)
    num_arrays: int = 0
    nbytes: Column = field(init=False)
    """Bytes of each piece over all the arrays: `[n]`."""
    _stacked: _Stacked | None = None

    def __post_init__(self) -> None:
        self.nbytes = np.zeros(len(self.match.target), np.int64)

    def add(self, of_class: ArrayClass) -> None:
        """Take in more arrays."""
        piece = self.match.piece
        elements = num_elements(of_class.edges, piece.low, piece.high)
        self.nbytes += elements * (of_class.itemsize * len(of_class.paths))
        self.classes.append(of_class)
        self.num_arrays += len(of_class.paths)
        self._stacked = None

    def place(self, row: int, offset: float, min_cut_bytes: int) -> tuple[int, int]:
        """Return (array, elements of its cut dim) near `offset` bytes into a piece of all the arrays.

        The end of all is (`num_arrays`, 0). No array is cut into a part below `min_cut_bytes`.
        """
        stacked = self._stack()
        nbytes = stacked.itemsize
        for along, start, stop in self._ends(row):
            nbytes = nbytes * (along[:, stop] - along[:, start])
        ends = (nbytes * stacked.num_arrays).cumsum()
        of_class = int(ends.searchsorted(offset, side="right"))
        if of_class == len(ends):
            return self.num_arrays, 0
        each, num_arrays = int(nbytes[of_class]), int(stacked.num_arrays[of_class])
        rest = offset - (int(ends[of_class]) - each * num_arrays)
        within = min(int(rest // each), num_arrays - 1)
        rest -= within * each
        array = int(stacked.first[of_class]) + within
        length = self._cut_length(row, of_class)
        cut = round(rest * length / each)
        cut_bytes = cut * (each // length)
        if min(cut_bytes, each - cut_bytes) >= max(min_cut_bytes, 1):
            return array, cut
        return (array, 0) if 2 * rest < each else (array + 1, 0)

    def cut_length(self, row: int, array: int) -> int:
        """Return the length of the dim along which a piece of one array is cut."""
        return self._cut_length(row, int(self._stack().first.searchsorted(array, side="right")) - 1)

    def _cut_length(self, row: int, of_class: int) -> int:
        lengths = [
            int(along[of_class, stop] - along[of_class, start]) for along, start, stop in self._ends(row)
        ]
        return lengths[cut_dim(lengths)] if lengths else 1

    def _ends(self, row: int) -> Iterator[tuple[Column, int, int]]:
        """Yield, by dim, all classes' edges and the numbers of those where the piece begins and ends."""
        piece = self.match.piece
        return zip(self._stack().edges, piece.low[row].tolist(), piece.high[row].tolist(), strict=True)

    def _stack(self) -> _Stacked:
        if self._stacked is None:
            num_arrays = np.array([len(of_class.paths) for of_class in self.classes])
            self._stacked = _Stacked(
                edges=tuple(
                    np.stack([of_class.edges[dim] for of_class in self.classes])
                    for dim in range(self.match.piece.low.shape[1])
                ),
                itemsize=np.array([of_class.itemsize for of_class in self.classes]),
                num_arrays=num_arrays,
                first=num_arrays.cumsum() - num_arrays,
            )
        return self._stacked
