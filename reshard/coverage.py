"""Which steps the survivors can still restore: commit is decided at recovery, by coverage.

A step counts only when its holdings cover every element of every array. The caller passes holdings
whose checksum has been verified: a torn or corrupt copy is left out, and so does not cover.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from reshard.boxes import Box, check_box, full_box, uncovered
from reshard.holdings import Holding


class GlobalArray(Protocol):
    """What coverage must know of an array; an `ArrayLayout` or a manifest entry will do."""

    @property
    def path(self) -> str:
        """Its name in the state's tree."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        ...


def newest_covered_step(arrays: Iterable[GlobalArray], holdings: Iterable[Holding]) -> int | None:
    """Return the newest step for which `holdings` cover all of `arrays`, or None when there is none.

    Holdings of arrays not listed are ignored. Raises `UsageError` for a holding outside its array.
    """
    arrays = tuple(arrays)
    by_step = _boxes_by_step(holdings)
    for step in sorted(by_step, reverse=True):
        if not any(_gaps(array, by_step[step][array.path]) for array in arrays):
            return step
    return None


def uncovered_at(
    arrays: Iterable[GlobalArray], holdings: Iterable[Holding], *, step: int
) -> dict[str, tuple[Box, ...]]:
    """Return, by path, the boxes of each array that no holding of `step` covers; complete arrays are absent.

    An array without a single holding counts as uncovered only when it has elements. Raises `UsageError`
    for a holding outside its array.
    """
    boxes = _boxes_by_step(holding for holding in holdings if holding.step == step)[step]
    gaps = {array.path: _gaps(array, boxes[array.path]) for array in arrays}
    return {path: missing for path, missing in sorted(gaps.items()) if missing}


def _gaps(array: GlobalArray, boxes: set[Box]) -> tuple[Box, ...]:
    for box in boxes:
        check_box(box, array.shape)
    return uncovered(full_box(array.shape), boxes)


def _boxes_by_step(holdings: Iterable[Holding]) -> defaultdict[int, defaultdict[str, set[Box]]]:
    by_step: defaultdict[int, defaultdict[str, set[Box]]] = defaultdict(lambda: defaultdict(set))
    for holding in holdings:
        by_step[holding.step][holding.path].add(holding.box)
    return by_step
