"""Records of commits and worlds with what the tests of stragglers do not care about filled in."""

from __future__ import annotations

from elastic.records import StepCommitted, WorldFormed


def committed(step: int, slice_index: int, generation: int = 1) -> StepCommitted:
    """A slice's commit of a step."""
    return StepCommitted(
        unix_s=float(step),
        generation=generation,
        slice_index=slice_index,
        step=step,
        position=step,
        sample_ids=(),
        loss=None,
        step_s=0.06,
        stall_s=0.0,
        captured_bytes=0,
    )


def formed(generation: int, slices: tuple[int, ...]) -> WorldFormed:
    """A world of these slices."""
    return WorldFormed(
        unix_s=0.0,
        generation=generation,
        slices=slices,
        mode="first",
        restored_step=None,
        newest_committed=-1,
        lost=(),
        joined=(),
        bytes_moved=0,
        bytes_lower_bound=0,
        explanation="",
    )
