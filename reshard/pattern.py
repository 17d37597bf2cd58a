"""Arrays that are partitioned and held alike, whose plan is worked out once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reshard.grid import Column, num_elements
from reshard.matching import Match
from reshard.plan_rows import ArrayClass, cut_dim


@dataclass(slots=True, eq=False)
class Pattern:
    """Arrays that are partitioned and held alike, what each host needs of them, and from where."""

    match: Match
    classes: list[ArrayClass] = field(default_factory=list)
    nbytes: Column = field(init=False)
    """Bytes of each piece over all the arrays: `[n]`."""
    _stacked: tuple[list[Column], Column, Column] | None = None

    def __post_init__(self) -> None:
        self.nbytes = np.zeros(len(self.match.target), np.int64)

    def add(self, of_class: ArrayClass) -> None:
        """Take in more arrays."""
        piece = self.match.piece
        elements = num_elements(of_class.edges, piece.low, piece.high)
        self.nbytes += elements * (of_class.itemsize * len(of_class.paths))
        self.classes.append(of_class)

        self._stacked = None

    @property
    def num_arrays(self) -> int:
        """The number of arrays."""
        return sum(len(of_class.paths) for of_class in self.classes)

    def array_bytes(self, row: int) -> Column:
        """Return the bytes of a piece in each array: `[num_arrays]`."""
        edges, itemsizes, class_of = self._stack()
        nbytes = itemsizes.copy()
        low, high = self.match.piece.low[row].tolist(), self.match.piece.high[row].tolist()
        for along, start, stop in zip(edges, low, high, strict=True):
            nbytes *= along[:, stop] - along[:, start]
        return nbytes[class_of]

    def cut_length(self, row: int, array: int) -> int:
        """Return the length of the dim along which a piece of one array is cut."""
        edges, _, class_of = self._stack()
        low, high = self.match.piece.low[row].tolist(), self.match.piece.high[row].tolist()
        of_class = class_of[array]
        ends = zip(edges, low, high, strict=True)
        lengths = [int(along[of_class, stop] - along[of_class, start]) for along, start, stop in ends]
        return lengths[cut_dim(lengths)] if lengths else 1

    def _stack(self) -> tuple[list[Column], Column, Column]:
        """Return by dim the edges of all classes, their itemsizes, and the class of each array."""
        if self._stacked is None:
            rank = self.match.piece.low.shape[1]
            self._stacked = (
                [np.stack([of_class.edges[dim] for of_class in self.classes]) for dim in range(rank)],
                np.array([of_class.itemsize for of_class in self.classes]),
                np.repeat(np.arange(len(self.classes)), [len(c.paths) for c in self.classes]),
            )
        return self._stacked
