"""Runs: lists of different lengths, one after the other in a column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.grid import Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """`values`, `[n, width]`, cut into runs: run i is `values[begin[i] : begin[i + 1]]`."""

    begin: Column
    values: Column

    @property
    def lengths(self) -> Column:
        """The length of each run: `[num_runs]`."""
        return np.diff(self.begin)

    def __len__(self) -> int:
        return len(self.begin) - 1

    @classmethod
    def of(cls, lengths: Column, values: Column) -> Runs:
        """Return the runs of these lengths."""
        return cls(begin=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))), values=values)

    def take(self, numbers: Column) -> Runs:
        """Return the runs with these numbers, in this order."""
        rows = spread(self.begin[numbers], self.lengths[numbers])
        return Runs.of(self.lengths[numbers], self.values[rows])

    def distinct(self) -> tuple[Runs, Column]:
        """Return the different runs, each once, and which of them each run is: `[num_runs]`."""
        number = np.empty(len(self), np.int64)
        first: list[Column] = [np.zeros(0, np.int64)]
        num_found = 0
        for length in np.unique(self.lengths).tolist():
            runs = np.flatnonzero(self.lengths == length)
            content = self.values[self.begin[runs][:, None] + np.arange(length)].reshape(len(runs), -1)
            found, which = _distinct_rows(np.ascontiguousarray(content))
            number[runs] = num_found + which
            first.append(runs[found])
            num_found += len(found)
        return self.take(np.concatenate(first)), number


def spread(begin: Column, lengths: Column) -> Column:
    """Return the numbers `begin[i]` to `begin[i] + lengths[i]` for every i, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(begin - ends + lengths, lengths)


def _distinct_rows(content: Column) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return where each different row is first, and which of these each row is."""
    if not content.shape[1]:
        return np.zeros(1, np.intp), np.zeros(len(content), np.intp)
    rows = content.view(np.dtype((np.void, content.dtype.itemsize * content.shape[1])))[:, 0]
    _, first, which = np.unique(rows, return_index=True, return_inverse=True)
    return first, which
