"""Bounds that only make sense in a certain order, and the error that says which two are not."""

from __future__ import annotations

from itertools import pairwise

from reshard.errors import UsageError


def check_order(**bounds_s: float) -> None:
    """Check that each bound, in seconds, is less than the one after it, and the first above 0.

    Raises UsageError, naming the first two that are not in order.
    """
    for name, bound_s in bounds_s.items():
        if not bound_s > 0:
            raise UsageError(f"{name} must be more than 0 s, not {bound_s:g}")
        break
    for (lower, lower_s), (upper, upper_s) in pairwise(bounds_s.items()):
        if not lower_s < upper_s:
            raise UsageError(
                f"bounds in the wrong order: {lower} ({lower_s:g} s) must be less than {upper}"
                f" ({upper_s:g} s)",
                remedy=f"Lower {lower} or raise {upper}.",
            )
