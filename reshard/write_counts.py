"""Counts how often each element of a box is written: the debug build of whatever fills boxes in pieces."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reshard.boxes import Box, relative_slices, shape_of
from reshard.errors import InvariantBrokenError, UsageError, format_box

_MOST = np.iinfo(np.uint8).max


class WriteCounts:
    """The counts of one box of array `path`: a byte an element, in the box's shape; they stop at 255."""

    def __init__(self, path: str, box: Box) -> None:
        self._path = path
        self._box = box
        self.counts: NDArray[np.uint8] = np.zeros(shape_of(box), np.uint8)

    def add(self, piece: Box) -> None:
        """Count one write of each element of `piece`. Raises `InvariantBrokenError` outside the box."""
        try:
            where = relative_slices(piece, self._box)
        except UsageError as error:
            raise self._broken(f"{format_box(piece)} is written, which is not inside it") from error
        written = self.counts[where]
        self.counts[where] = written + (written < _MOST)

    def fill(self, piece: Box) -> None:
        """Count the elements of `piece` that were not written as written once: they were there before."""
        where = relative_slices(piece, self._box)
        self.counts[where] = np.maximum(self.counts[where], 1)

    def check_once(self) -> None:
        """Raise `InvariantBrokenError`, naming an element, unless each was written exactly once."""
        self._check(self.counts != 1)

    def check_at_most_once(self) -> None:
        """Raise `InvariantBrokenError`, naming an element, when one was written more than once."""
        self._check(self.counts > 1)

    def _check(self, wrong: NDArray[np.bool_]) -> None:
        if not wrong.any():
            return
        first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        element = tuple(int(index) + start for index, (start, _) in zip(first, self._box, strict=True))
        raise self._broken(
            f"elements are written {self.counts.min()} to {self.counts.max()} times, "
            f"{element} {self.counts[first]} times"
        )

    def _broken(self, what: str) -> InvariantBrokenError:
        return InvariantBrokenError(
            f"{self._path!r} {format_box(self._box)}: {what}", path=self._path, box=self._box
        )
