"""Fencing: the next generation begins, and everybody gets out of every older world."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.events import EndWorker, Fence, Phase, WorkerState
from elastic.kept_runtime import note_fence
from elastic.moves_audit import tell_comparisons
from elastic.moves_decide import choose, decide, ready_slices
from elastic.moves_persist import leave_world
from elastic.moves_shadow import give_up
from elastic.state import Config, Member
from elastic.turn import Turn

STUCK = "did not leave the broken world in time"


def shrink(turn: Turn, lost: tuple[int, ...]) -> None:
    """Members are lost: start the next generation without their slices."""
    fence(turn, f"lost: {name_members(turn.state.config, lost)}", is_loss=True)


def fence(turn: Turn, why: str, *, is_loss: bool = False, within_s: float | None = None) -> None:
    """Raise the generation and get everybody out of every older world, within the usual bound or this one."""
    leave_world(turn, "the world changed while its hosts wrote it")
    tell_comparisons(turn)
    give_up(turn)
    state = turn.state
    generation = state.generation + 1
    leaving = [member.index for member in state.members if member.leaving]
    for index in leaving:
        if index in state.world:
            cause = "told to leave (SIGTERM), left at a step boundary"
            turn.write_loss(index, cause, "preemption-notice", turn.now.unix_s)
    turn.state = turn.state.with_members(
        fenced=False, done=False, left=False, finished=False, respawning=False, snapshots=()
    )
    turn.change(
        generation=generation,
        newest_before=state.newest_committed,
        joining=False,
        stop_step=None,
        choice=None,
        digesting=False,
        finish_by_s=None,
        overtime=False,
    )
    keeps = note_fence(turn, is_loss=is_loss)
    turn.enter(Phase.FENCING, why, within_s=within_s or state.config.timing.unwind_s)
    for member in turn.state.members:
        index = member.index
        if member.attached:
            leave_out = index in leaving
            turn.send(Fence(member=index, generation=generation, leave_out=leave_out, keep_runtime=keeps))
    for index in leaving:
        turn.plan_restart(index)
        for other in state.config.members_of(state.config.slice_of(index)):
            turn.update(other, joined_s=None)
    advance_fencing(turn)


def overtake(turn: Turn, generation: int) -> None:
    """A host has heard of a later generation than this job knows of: begin one that is later still."""
    turn.change(generation=generation)
    fence(turn, f"a host was in generation {generation} already")


def advance_fencing(turn: Turn) -> None:
    """Decide once all have reported and nobody is inside an older world; replace what does not get out."""
    attached = [member for member in turn.state.members if member.attached]
    inside = [member.index for member in attached if member.worker is WorkerState.IN_WORLD]
    respawning = [member.index for member in attached if member.respawning]
    silent = [member.index for member in attached if not member.fenced]
    if not turn.is_late():
        if inside or respawning or silent:
            return
    elif not turn.state.overtime and (inside or silent or respawning):
        _go_into_overtime(turn, inside)
        return
    else:
        for index in inside + respawning:
            turn.end_worker(index, STUCK)
    away = [member for member in turn.state.members if not member.attached]
    if any(_is_worth_waiting(turn, member) for member in away):
        return
    for member in away:
        if member.worker in (WorkerState.IN_WORLD, WorkerState.READY):
            turn.count_as_lost(member.index)
    decide(turn)


def _go_into_overtime(turn: Turn, inside: list[int]) -> None:
    """Who did not get out of the broken world is ended; another is started, to restore from the arenas."""
    timing = turn.state.config.timing
    is_replaced = inside or any(member.respawning for member in turn.state.members)
    bound_s = timing.start_s if is_replaced else timing.stage_s
    turn.change(overtime=True, deadline_s=turn.now.mono_s + bound_s)
    for index in inside:
        turn.send(EndWorker(member=index, why=STUCK))
        turn.plan_restart(index)
        turn.start_worker(index)
        turn.update(index, respawning=True)
        turn.write_worker(index, "respawned", 0, STUCK)


def _is_worth_waiting(turn: Turn, member: Member) -> bool:
    """Whether a host away has to be waited for: it may still make steps, or its memory is needed."""
    if member.gone_since_s is None:
        return False
    patience_s = turn.patience_s(member)
    if _cannot_go_on(turn):
        patience_s = max(patience_s, turn.state.config.timing.agent_grace_s)
    return not turn.is_past(member.gone_since_s + patience_s)


def _cannot_go_on(turn: Turn) -> bool:
    state = turn.state
    if len(ready_slices(turn)) < state.config.min_slices:
        return True
    return state.newest_committed >= 0 and choose(turn)[0] is None


def name_members(config: Config, members: Sequence[int]) -> str:
    """Members for a sentence: their slices, and their hosts where a slice has several."""
    if config.hosts_per_slice == 1:
        return name_slices(tuple(members))
    return ", ".join(map(config.name, members)) or "no host"


def name_slices(slices: list[int] | tuple[int, ...]) -> str:
    """Slices for a sentence."""
    if len(slices) == 1:
        return f"slice {slices[0]}"
    return f"slices {', '.join(map(str, slices)) or 'none'}"
