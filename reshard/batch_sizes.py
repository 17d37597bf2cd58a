"""How many samples each step takes, and what that does to the learning rate.

Either the global batch stays the same, or each slice's share of it does. A step that was committed once and
is run again after a recovery takes as many samples as it took then, however many slices are left: so the
stream of samples has neither gap nor repetition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from reshard.errors import UsageError

LrRule = Literal["linear", "sqrt", "none"]
"""How the learning rate follows a global batch that is k times as large.

`linear`: k times; found by experiment for SGD (Krizhevsky 2014, arXiv:1404.5997; Goyal et al. 2017,
arXiv:1706.02677). `sqrt`: √k times, which keeps the variance of a step (Krizhevsky 2014; Hoffer et al. 2017,
arXiv:1705.08741), and is derived for Adam and RMSProp by Malladi et al. 2022, arXiv:2205.10287. `none`: as
it is.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Every step takes `num_rows` samples, whatever number of slices is alive."""

    num_rows: int

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise UsageError(f"a global batch must have at least 1 sample, not {self.num_rows}")

    def global_batch(self, num_slices: int) -> int:
        """Samples of a step that is new in a world of so many slices."""
        return self.num_rows

    def lr_scale(self, global_batch: int) -> float:
        """What to multiply the learning rate by at a step of so many samples."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceBatch:
    """Every step takes `rows_per_slice` samples for each slice alive; the job has `full_slices` at best.

    The learning rate belongs to the batch of all slices; at another one it follows `lr_rule`.
    """

    rows_per_slice: int
    full_slices: int
    lr_rule: LrRule

    def __post_init__(self) -> None:
        if self.rows_per_slice < 1 or self.full_slices < 1:
            raise UsageError(
                f"a slice's batch must have at least 1 sample, on at least 1 slice, not {self.rows_per_slice}"
                f" on {self.full_slices}"
            )
        if self.lr_rule not in get_args(LrRule):
            raise UsageError(
                f"there is no learning-rate rule {self.lr_rule!r}",
                remedy=f"Choose one of {', '.join(get_args(LrRule))}.",
            )

    def global_batch(self, num_slices: int) -> int:
        """Samples of a step that is new in a world of so many slices."""
        return self.rows_per_slice * num_slices

    def lr_scale(self, global_batch: int) -> float:
        """What to multiply the learning rate by at a step of so many samples."""
        if self.lr_rule == "none":
            return 1.0
        ratio = global_batch / self.global_batch(self.full_slices)
        return ratio if self.lr_rule == "linear" else math.sqrt(ratio)


BatchSize = GlobalBatch | SliceBatch


def choose_batch_size(
    *,
    global_batch: int | None,
    slice_batch: int | None,
    lr_rule: LrRule | None,
    full_slices: int,
    is_weighted: bool,
) -> BatchSize:
    """Return what a training loop asks for: exactly one of `global_batch` and `slice_batch`.

    `is_weighted`: rows may be padding, told by their weight. Raises UsageError for both or neither, when a
    rule for the learning rate is missing or has no meaning, and for a `slice_batch` without weights.
    """
    if global_batch is not None and slice_batch is None:
        if lr_rule is not None:
            raise UsageError(
                f"lr_rule={lr_rule!r} has no meaning with a global batch that stays the same",
                remedy="Leave lr_rule out, or give slice_batch instead of global_batch.",
            )
        return GlobalBatch(num_rows=global_batch)
    if slice_batch is not None and global_batch is None:
        if lr_rule is None:
            raise UsageError(
                "with slice_batch the global batch changes, and nothing says how the learning rate follows",
                remedy='Give lr_rule: "linear" (SGD), "sqrt" (Adam) or "none".',
            )
        if not is_weighted:
            raise UsageError(
                "with slice_batch a step may be run again on fewer slices, where its rows need not divide",
                remedy='Give weight_key="weight" and weight the loss by batch["weight"].',
            )
        return SliceBatch(rows_per_slice=slice_batch, full_slices=full_slices, lr_rule=lr_rule)
    raise UsageError(
        "a batch needs either global_batch or slice_batch",
        remedy="Give global_batch to keep it on fewer slices, slice_batch to keep the load of each slice.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSteps:
    """From `first_step` on, steps were new in the world of `generation`, which had `num_slices` slices."""

    first_step: int
    generation: int
    num_slices: int


def begin_world(
    earlier: Sequence[NewSteps],
    *,
    restored_step: int,
    newest_committed: int,
    generation: int,
    num_slices: int,
) -> tuple[NewSteps, ...]:
    """Return the worlds that new steps belong to, with one more: what is beyond `newest_committed` is its.

    A world that committed nothing new has no place there any more. The first one of a job has all that comes
    after `restored_step` (-1: a fresh state): what earlier jobs committed beyond it is not known here.
    """
    kept = tuple(world for world in earlier if world.first_step <= newest_committed)
    first_step = 1 + (newest_committed if kept else restored_step)
    return *kept, NewSteps(first_step=first_step, generation=generation, num_slices=num_slices)


def world_of(worlds: Sequence[NewSteps], step: int) -> NewSteps:
    """Return the world in which `step` is, or was at first, new: the oldest for what came before all."""
    return next((world for world in reversed(worlds) if world.first_step <= step), worlds[0])


def worlds_since(worlds: Sequence[NewSteps], step: int) -> tuple[NewSteps, ...]:
    """Return those worlds in which `step`, or one after it, was new."""
    return tuple(worlds[worlds.index(world_of(worlds, step)) :])
