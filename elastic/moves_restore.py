"""From a decided world to its first new step: restore, rebuild, replay."""

from __future__ import annotations

from elastic.events import Assign, Event, LaidOut, Phase, WorkerState, WorldSpec
from elastic.kept_runtime import note_up
from elastic.moves_digest import check_restored
from elastic.moves_end import fail
from elastic.moves_fence import fence, shrink
from elastic.moves_hang import look_for_hang
from elastic.moves_persist import refuse
from elastic.moves_run import finish
from elastic.moves_shadow import note_compiled
from elastic.seats import logical
from elastic.solo_worlds import sizes_ahead, solo_world
from elastic.turn import Turn
from reshard.batch_sizes import begin_world, worlds_since

MAX_RETRIES = 3


def advance_planning(turn: Turn) -> None:
    """A world with a fresh state only waits for its runtime service."""
    _assign_when_staged(turn, staged=True)


def advance_restoring(turn: Turn) -> None:
    """Go on once every host has, verified, what it needs; a copy that turned out bad means another choice."""
    state = turn.state
    _assign_when_staged(turn, staged=all(state.member(index).done for index in state.world))


def _assign_when_staged(turn: Turn, *, staged: bool) -> None:
    state = turn.state
    if lost := turn.lost_members():
        shrink(turn, lost)
    elif turn.stage_error:
        if state.choice is not None and state.choice.is_persisted:
            refuse(turn, state.choice.step, turn.stage_error)
        try_again(turn, turn.stage_error)
    elif staged and state.service_generation == state.runtime_generation:
        assign(turn)
    elif turn.is_late():
        try_again(turn, "the runtime service did not come up" if staged else "fetching took too long")


def try_again(turn: Turn, why: str) -> None:
    """This world does not come about: another one, a few times."""
    turn.change(stage_failures=turn.state.stage_failures + 1)
    if turn.state.stage_failures > MAX_RETRIES:
        fail(turn, f"the restore failed {turn.state.stage_failures} times in a row: {why}")
    else:
        fence(turn, f"choose again: {why}")


def assign(turn: Turn) -> None:
    """Tell each worker its place in the new world."""
    state = turn.state
    turn.enter(Phase.REBUILDING, within_s=state.config.timing.rebuild_s)
    restored_step = state.choice.step if state.choice else -1
    new_steps = begin_world(
        state.new_steps,
        restored_step=restored_step,
        newest_committed=state.newest_committed,
        generation=state.generation,
        num_slices=len(state.world_slices),
    )
    if not state.rehearsing:
        # From now on this world may capture: what was captured beyond its step before is left behind.
        restored_steps = (*state.restored_steps, (state.generation, restored_step))
        turn.change(restored_steps=restored_steps, new_steps=new_steps)
    copies = state.choice.left_out if state.choice else ()
    slices = state.world_slices
    seats = logical(state.seats, slices)
    left_out = tuple((copy.host, copy.path, copy.box) for copy in copies)
    is_new_runtime = state.runtime_generation == state.generation
    for rank, index in enumerate(state.world):
        turn.update(index, worker=WorkerState.IN_WORLD, done=False, fresh=False)
        turn.send(
            Assign(
                member=index,
                world=WorldSpec(
                    generation=state.generation,
                    rank=rank,
                    slices=slices,
                    hosts_per_slice=state.config.hosts_per_slice,
                    service_address=state.service_address,
                    seats=() if seats == slices else seats,
                    restore_step=state.choice.step if state.choice else None,
                    restore_generation=state.choice.generation if state.choice else None,
                    restore_position=state.choice.position if state.choice else 0,
                    left_out=left_out,
                    newest_committed=state.newest_committed,
                    rehearsal=state.rehearsing,
                    replicas=state.config.replicas,
                    persists=state.config.persists,
                    audit_every=state.config.audit_every,
                    new_steps=worlds_since(new_steps, restored_step + 1),
                    count_writes=state.config.count_writes,
                    runtime_generation=0 if is_new_runtime else state.runtime_generation,
                ),
            )
        )
    if state.rehearsing:
        _assign_solo(turn)


def _assign_solo(turn: Turn) -> None:
    """Whoever is left out of a rehearsal plays it alone: one day the world is smaller by another slice."""
    state = turn.state
    size = len(state.world_slices)
    if not (state.config.plays_alone and size in sizes_ahead(state.config, size)):
        return
    idle = [member for index in state.idle for member in state.config.members_of(index)]
    for index in idle:
        if state.member(index).worker is WorkerState.READY:
            turn.update(index, worker=WorkerState.IN_WORLD)
            turn.send(Assign(member=index, world=solo_world(state.config, size, state.generation)))


def lay_out_anew(turn: Turn, event: Event) -> None:
    """A script that asks for boxes which were not planned for gets a world planned for them, in a new try."""
    assert isinstance(event, LaidOut)
    if event.lacking:
        who = turn.state.config.name(event.member)
        try_again(turn, f"{who} asks for another layout than was planned: {event.lacking}")


def advance_rebuilding(turn: Turn) -> None:
    """Go on once every worker has its state on its devices; one that does not get there is lost."""
    if lost := turn.lost_members():
        shrink(turn, lost)
        return
    late = tuple(index for index in turn.state.world if not turn.state.member(index).done)
    if not late:
        note_up(turn)
        turn.enter(Phase.REPLAYING)
        check_restored(turn)
        advance_replaying(turn)
    elif turn.is_late():
        for index in late:
            cause = "did not rebuild in time"
            turn.write_loss(index, cause, "rebuild-bound", turn.state.member(index).last_life_unix_s)
            turn.end_worker(index, cause)
        shrink(turn, late)


def advance_replaying(turn: Turn) -> None:
    """The recovery is over with the first step beyond those committed before it."""
    state = turn.state
    if lost := turn.lost_members():
        shrink(turn, lost)
    elif state.rehearsing:
        if all(state.member(index).left for index in state.world):
            turn.change(rehearsals_left=state.rehearsals_left - 1)
            note_compiled(turn, len(state.world_slices))
            # Who rehearses alone may still be in the middle of the program.
            is_solo_left = set(state.members_with(WorkerState.IN_WORLD)) > set(state.world)
            bound_s = state.config.timing.rebuild_s if is_solo_left else None
            fence(turn, "the rehearsal is over", within_s=bound_s)
    elif state.all_finished():
        turn.enter(Phase.RUNNING)
        finish(turn)
    elif state.newest_committed > state.newest_before:
        turn.change(stage_failures=0)
        note_compiled(turn, len(state.world_slices))
        turn.enter(Phase.RUNNING)
    else:
        look_for_hang(turn)
