"""Whether a world goes on in the runtime that its processes are connected with, or connects a new one. Pure.

A runtime (for multi-controller JAX: a backend, its coordination service and the programs loaded into it) that
spans more processes than are left can still serve those that are left: they form new groups among themselves.
Nothing has to be connected, traced, lowered or loaded then but what the step itself needs for its new mesh.
That is only right where no group of the old world is wholly among those who are left, since such a group's
connections were cut to get its members out, and the runtime would take them up again.
"""

from __future__ import annotations

from elastic.choose import Choice
from elastic.events import StepFailed
from elastic.turn import Turn

MAX_REFUSALS = 2
"""A second loss may be what failed the first step in a kept runtime. After so many it is tried no more."""


def note_up(turn: Turn) -> None:
    """All processes of the world are connected."""
    turn.change(runtime_is_up=True)


def note_fence(turn: Turn, *, is_loss: bool) -> bool:
    """A world is left; returns whether the workers are to hold on to their runtime for the next one."""
    state, config = turn.state, turn.state.config
    may_keep = config.keeps_runtime and config.hosts_per_slice == 1 and state.runtime_refusals < MAX_REFUSALS
    is_kept = may_keep and state.runtime_is_up and is_loss
    turn.change(runtime_is_up=is_kept)
    return is_kept


def choose_runtime(turn: Turn, slices: tuple[int, ...], mode: str, choice: Choice | None) -> bool:
    """Fix the runtime of the world that is formed of `slices`; returns whether it has to be started.

    To be called before the state tells the new world.
    """
    state = turn.state
    is_kept = (
        state.runtime_is_up
        and mode == "in-place"
        and set(slices) < set(state.world_slices)
        and choice is not None
        and sum(size > 1 for size in choice.layout.mesh.axis_sizes) <= 1
        and state.config.devices_per_host == 1
    )
    generation = state.runtime_generation if is_kept else state.generation
    turn.change(runtime_generation=generation, runtime_is_up=False)
    return not is_kept


def refuses(turn: Turn, event: StepFailed) -> bool:
    """Whether a step failed before the first one that a kept runtime made: it may not serve this world."""
    state = turn.state
    is_kept = state.runtime_generation != state.generation
    is_first = state.newest_committed <= state.newest_before
    if not (is_kept and is_first and event.generation == state.generation):
        return False
    turn.change(runtime_refusals=state.runtime_refusals + 1)
    return True
