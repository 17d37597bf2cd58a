"""Slices that are lost again soon after they joined: each time they wait longer before they may come back.

The first loss costs nothing; the next one soon after a join a base time, each further one twice as long as
the one before. A slice that stays healthy for long enough starts anew. While no world runs nobody is kept
away: the job may need the slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic.events import WorkerState
from elastic.records import SliceQuarantined
from reshard.errors import UsageError

if TYPE_CHECKING:
    from elastic.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Flapping:
    """The bounds, in seconds. `base_s` 0: no slice is ever kept away."""

    base_s: float = 5.0
    max_s: float = 300.0
    healthy_s: float = 60.0
    """How long a slice must have been part of the job for its next loss to count as its first."""

    def __post_init__(self) -> None:
        if not 0 <= self.base_s <= self.max_s:
            raise UsageError(
                f"a quarantine must begin with 0 or more seconds and at most {self.max_s}, not {self.base_s}"
            )
        if self.healthy_s <= 0:
            raise UsageError(f"a slice must be healthy for more than 0 seconds, not {self.healthy_s}")

    def delay_s(self, num_losses: int) -> float:
        """How long a slice waits after so many losses in a row: 0, then 1, 2, 4 … times the base."""
        if num_losses < 2:
            return 0.0
        doublings = min(num_losses - 2, 64)
        return min(self.base_s * 2.0**doublings, self.max_s)


def joined(turn: Turn, index: int) -> None:
    """A host has its part in a world: from now on it is healthy."""
    if turn.state.member(index).joined_s is None:
        turn.update(index, joined_s=turn.now.mono_s)


def lost(turn: Turn, index: int, cause: str) -> None:
    """A host is being lost by a fault of its own: its slice may have to wait before it comes back.

    Losses are the slice's, whichever of its hosts they hit; of several at once the first one counts.
    """
    config = turn.state.config
    bounds, member = config.flapping, turn.state.member(index)
    slice_index = config.slice_of(index)
    all_of_slice = config.members_of(slice_index)
    if any(turn.state.member(one).worker is WorkerState.NONE for one in all_of_slice):
        return  # counted already
    was_healthy_s = 0.0 if member.joined_s is None else turn.now.mono_s - member.joined_s
    num_losses = 1 if was_healthy_s >= bounds.healthy_s else member.losses_in_row + 1
    delay_s = bounds.delay_s(num_losses)
    until_s = turn.now.mono_s + delay_s if delay_s else None
    for one in all_of_slice:
        turn.update(one, joined_s=None, losses_in_row=num_losses, quarantined_until_s=until_s)
    if delay_s and config.rejoin_after_steps is not None:
        turn.write(
            SliceQuarantined(
                unix_s=turn.now.unix_s,
                generation=turn.state.generation,
                slice_index=slice_index,
                losses_in_row=num_losses,
                healthy_s=was_healthy_s,
                delay_s=delay_s,
                cause=cause,
            )
        )


def remaining_s(until_s: float | None, now_s: float) -> float:
    """How long a quarantine still lasts; 0 for none."""
    return 0.0 if until_s is None else max(until_s - now_s, 0.0)
