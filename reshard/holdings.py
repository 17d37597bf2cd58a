"""Which host has which shard of which step, and in what memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from reshard.boxes import Box, check_box
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import MOST_BYTES, Layout

Shard = tuple[str, Box]
"""Which shard: the path of an array and a box of it."""
Tier = Literal["device", "shm", "peer", "persistent"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""Places a shard can be, the nearest first: the order in which sources are preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One shard that a host has: a box of an array at a step.

    `checksum` is that of the shard's bytes in C order, as the manifest recorded it. Raises `UsageError`
    for a negative step, an unknown tier or a malformed box, also one beyond any array.
    """

    host: HostId
    step: int
    path: str
    box: Box
    checksum: int
    tier: Tier

    def __post_init__(self) -> None:
        if self.step < 0:
            raise UsageError(f"a holding of {self.path!r} has step {self.step}, below zero", path=self.path)
        if self.tier not in TIERS:
            raise UsageError(f"{self.tier!r} is not a tier; one of {', '.join(TIERS)}", tier=self.tier)
        check_box(self.box)
        if any(stop > MOST_BYTES for _, stop in self.box):
            raise UsageError(
                f"a holding of {self.path!r} has box {self.box}, beyond any array", path=self.path
            )


def layout_holdings(
    layout: Layout, *, step: int, tier: Tier = "shm", checksum: int = 0
) -> tuple[Holding, ...]:
    """Return a holding for every distinct box of every array on every host of the layout."""
    return tuple(
        Holding(host=host, step=step, path=array.path, box=box, checksum=checksum, tier=tier)
        for array in layout.arrays
        for host, boxes in layout.boxes_by_host(array).items()
        for box in boxes
    )
