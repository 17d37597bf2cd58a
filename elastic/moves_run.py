"""While a job waits for members or its world runs: joins, leaves, the end of training."""

from __future__ import annotations

from elastic.choose import choose_persisted
from elastic.events import StopAfter, WorkerState
from elastic.moves_decide import digest
from elastic.moves_digest import final_choice
from elastic.moves_end import complete, describe_state_left, fail
from elastic.moves_fence import fence, name_members, name_slices, shrink
from elastic.moves_hang import look_for_hang
from elastic.moves_persist import give_up_late
from elastic.moves_prepare import is_prepared, prepare_outsiders
from elastic.moves_shadow import look
from elastic.seats import seated
from elastic.turn import Turn

STEPS_TO_BOUNDARY = 2
"""A running step and one more, so that the word to stop arrives everywhere before the boundary."""


# ---- waiting for members -----------------------------------------------------------------------------------


def advance_waiting(turn: Turn) -> None:
    """Go on as soon as everybody expected is there; at the bound, with whoever suffices."""
    turn.start_due(at_once=True)
    state = turn.state
    ready = seated(state.seats, state.whole(state.members_with(WorkerState.READY)))
    if state.uncovered:
        if turn.is_late() and choose_persisted(state.persisted, dict(state.restored_steps)) is not None:
            turn.change(uncovered="", memory_given_up=True)
            fence(turn, "no host came back that holds the state in memory")
        elif turn.is_late():
            fail(turn, describe_state_left(turn))
    elif len(ready) >= state.config.min_slices:
        if _is_everybody_there(turn, len(ready)):
            fence(turn, f"ready: {name_slices(ready)}")
    elif turn.is_late() or _nobody_else_comes(turn):
        cause = f"; last, {state.last_cause}" if state.last_cause else ""
        fail(
            turn,
            f"{len(ready)} of at least {state.config.min_slices} slices were there in time"
            f" (there: {name_slices(ready)}); {describe_state_left(turn)}{cause}",
        )


def _is_everybody_there(turn: Turn, num_ready: int) -> bool:
    """Whether to go on with those who are ready: all, or no more soon."""
    state = turn.state
    if turn.is_late():
        return True
    if not state.started:  # a spare is none while the slices themselves are still starting
        return set(state.seats) <= set(state.whole(state.members_with(WorkerState.READY)))
    if num_ready == state.config.num_slices:
        return True
    if turn.is_reconvening():
        return False
    if state.gather_until_s is None:
        turn.change(gather_until_s=turn.now.mono_s + state.config.timing.gather_s)
    return not state.members_with(WorkerState.STARTING) or turn.is_past(turn.state.gather_until_s)


def _nobody_else_comes(turn: Turn) -> bool:
    """Whether too few are left that have not used up their starts."""
    config = turn.state.config
    worn_out = {
        config.slice_of(member.index)
        for member in turn.state.members
        if member.attached and member.worker is WorkerState.NONE and member.starts >= config.max_starts
    }
    return config.num_all_slices - len(worn_out) < config.min_slices


# ---- a world runs ------------------------------------------------------------------------------------------


def advance_running(turn: Turn) -> None:
    """Look after a running world: its end, losses that took their time, starts that are due, boundaries."""
    if turn.state.digesting:
        finish(turn)
        return
    if lost := turn.lost_members():
        shrink(turn, lost)
        return
    if turn.state.all_finished():
        finish(turn)
        return
    turn.start_due()
    give_up_late(turn)
    state = turn.state
    if turn.is_past(state.finish_by_s):
        ended = name_members(state.config, [m for m in state.world if state.member(m).finished])
        fail(turn, f"the loop of {ended} ended after step {state.finished_step}, the others' did not")
        return
    if state.joining:
        _advance_joining(turn)
        return
    here = state.members_with(WorkerState.READY) + state.members_with(WorkerState.IN_WORLD)
    # Hosts of a slice that is not whole wait: nothing is stopped for them.
    able = state.whole(index for index in here if not state.member(index).leaving)
    coming = [index for index in seated(state.seats, able) if index not in state.world_slices]
    if set(coming) <= set(state.idle):
        coming = []  # they were there already, and no layout takes them
    going = [index for index in state.world if state.member(index).leaving]
    prepare_outsiders(turn)
    comers = [member for index in coming for member in state.config.members_of(index)]
    if not all(is_prepared(turn, member) for member in comers):
        coming = []  # the others train on meanwhile
    if (coming or going) and not any(state.member(index).finished for index in state.world):
        _ask_for_boundary(turn)
        return
    look(turn)
    look_for_hang(turn)


def _ask_for_boundary(turn: Turn) -> None:
    """Let all of the world stop after the same step, so that the change costs no replay."""
    state = turn.state
    stop_step = state.newest_committed + STEPS_TO_BOUNDARY
    deadline_s = turn.now.mono_s + state.config.timing.join_s
    turn.change(joining=True, stop_step=stop_step, deadline_s=deadline_s)
    for index in state.world:
        turn.send(StopAfter(member=index, generation=state.generation, step=stop_step))


def _advance_joining(turn: Turn) -> None:
    state = turn.state
    stopped = [member for member in map(state.member, state.world) if member.left or member.finished]
    if len(stopped) == len(state.world):
        fence(turn, "all stopped at the step boundary")
    elif turn.is_late():
        fence(turn, "not all reached the step boundary in time")
    elif stopped and state.deadline_s is not None:
        # They stop after one and the same step: who is not there soon has missed the word and is in the next.
        soon_s = turn.now.mono_s + state.config.timing.suspect_s
        turn.change(deadline_s=min(state.deadline_s, soon_s))


# ---- the end of training -----------------------------------------------------------------------------------


def finish(turn: Turn) -> None:
    """All loops have ended: have the final state's digest computed and the state persisted, then complete."""
    state = turn.state
    assert state.finished_step is not None
    if state.digesting:
        is_done = state.final_digest is not None and state.is_persist_settled(state.finished_step)
        if is_done or turn.is_late():
            complete(turn)
        return
    choice = final_choice(turn)
    if choice is None:
        complete(turn)
        return
    timing = state.config.timing
    bound_s = timing.persist_s if state.config.persists else timing.digest_s
    turn.change(digesting=True, deadline_s=turn.now.mono_s + bound_s)
    digest(turn, choice, "final")
