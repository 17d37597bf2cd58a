"""How far apart two hosts are: which sources a plan prefers."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bandwidth between two hosts of one slice and of two slices, in any unit, as only their order counts.

    A source in the target's own slice is preferred when it is faster to reach, and sources are then evened
    out among those alone; with equal bandwidths all sources are alike. A host itself is always nearest.
    Raises `UsageError` unless both are positive.
    """

    same_slice: float = 2.0
    other_slice: float = 1.0

    def __post_init__(self) -> None:
        if min(self.same_slice, self.other_slice) <= 0:
            raise UsageError(f"links need positive bandwidths, got {self.same_slice}, {self.other_slice}")

    @property
    def prefers_own_slice(self) -> bool:
        """Whether a source in the target's slice is nearer than one in another."""
        return self.same_slice > self.other_slice
