"""Arithmetic on boxes: half-open index ranges, one a dimension.

The box of a scalar is `()` and has one element. A box with an empty range has none; it intersects
nothing and is covered by anything. All functions are pure and expect boxes of one rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from reshard.errors import Box, UsageError, format_box

__all__ = [
    "Box",
    "BoxIndex",
    "check_box",
    "contains",
    "format_box",
    "full_box",
    "intersect",
    "is_covered",
    "relative_slices",
    "shape_of",
    "subtract",
    "uncovered",
    "volume",
]


def check_box(box: Box, shape: Sequence[int] | None = None) -> None:
    """Raise `UsageError` unless every range is ordered, not negative and, given a shape, inside it."""
    if any(not 0 <= start <= stop for start, stop in box):
        raise UsageError(f"{format_box(box)} is not a box: need 0 <= start <= stop in each dim", box=box)
    if shape is None:
        return
    if len(box) != len(shape) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
        raise UsageError(f"box {format_box(box)} is outside an array of shape {tuple(shape)}", box=box)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole array of this shape."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the length of the box in each dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements in the box; 1 for a scalar's `()`."""
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box of the elements in both, or None when there is none."""
    common: list[tuple[int, int]] = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        # A loop that leaves early, and comparisons instead of min and max: the planner lives in here.
        start = a_start if a_start > b_start else b_start
        stop = a_stop if a_stop < b_stop else b_stop
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def contains(outer: Box, inner: Box) -> bool:
    """Tell whether every index range of `inner` lies within that of `outer`."""
    return all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def subtract(box: Box, hole: Box) -> tuple[Box, ...]:
    """Return disjoint, non-empty boxes that hold exactly the elements of `box` outside `hole`.

    At most two boxes a dimension; earlier dimensions are cut first, so the pieces stay as contiguous in
    C order as they can be.
    """
    common = intersect(box, hole)
    if common is None:
        return (box,) if volume(box) else ()
    pieces: list[Box] = []
    for dim, ((start, stop), (cut_start, cut_stop)) in enumerate(zip(box, common, strict=True)):
        before, after = common[:dim], box[dim + 1 :]
        if start < cut_start:
            pieces.append((*before, (start, cut_start), *after))
        if cut_stop < stop:
            pieces.append((*before, (cut_stop, stop), *after))
    return tuple(pieces)


def uncovered(box: Box, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return disjoint boxes, sorted, of the elements of `box` that are in none of `boxes`."""
    remaining: list[Box] = [box] if volume(box) else []
    # Sorted, the cuts sweep through the box in C order, which keeps the remainder in few fragments.
    for hole in sorted(set(boxes)):
        if not remaining:
            break
        remaining = [piece for fragment in remaining for piece in subtract(fragment, hole)]
    return tuple(sorted(remaining))


def is_covered(box: Box, boxes: Iterable[Box]) -> bool:
    """Tell whether every element of `box` is in at least one of `boxes`."""
    return not uncovered(box, boxes)


def relative_slices(piece: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices that select `piece` in a buffer that holds `box`.

    Raises `UsageError` when the piece is not inside the box.
    """
    if len(piece) != len(box) or not contains(box, piece):
        raise UsageError(
            f"piece {format_box(piece)} is not inside box {format_box(box)}", piece=piece, box=box
        )
    return tuple(slice(p[0] - b[0], p[1] - b[0]) for p, b in zip(piece, box, strict=True))


class BoxIndex:
    """Finds which of a fixed set of boxes meet a given one, without looking at them all.

    Boxes are sorted by their start along the dimension that tells most of them apart, and a query
    bisects that order. Boxes must be of one rank; duplicates count once.
    """

    __slots__ = ("_boxes", "_dim", "_longest", "_starts")

    def __init__(self, boxes: Iterable[Box]) -> None:
        distinct = sorted(set(boxes))
        rank = len(distinct[0]) if distinct else 0
        num_starts = [len({box[dim][0] for box in distinct}) for dim in range(rank)]
        self._dim = max(range(rank), key=num_starts.__getitem__, default=-1)
        if self._dim >= 0:
            distinct.sort(key=lambda box: box[self._dim][0])
        self._boxes = distinct
        self._starts = [box[self._dim][0] for box in distinct] if self._dim >= 0 else []
        self._longest = (
            max((shape_of(box)[self._dim] for box in distinct), default=0) if self._dim >= 0 else 0
        )

    def overlapping(self, region: Box) -> tuple[Box, ...]:
        """Return, sorted, the boxes that have at least one element in common with `region`."""
        candidates = self._boxes
        if self._dim >= 0:
            start, stop = region[self._dim]
            low = bisect_left(self._starts, start - self._longest)
            candidates = candidates[low : bisect_left(self._starts, stop)]
        return tuple(sorted(box for box in candidates if intersect(box, region) is not None))
