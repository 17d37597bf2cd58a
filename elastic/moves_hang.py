"""When no step ends in time: find out who has not arrived, end those, go on without them."""

from __future__ import annotations

from elastic.detector_events import StacksTaken, TakeStacks
from elastic.events import Committed, WorkerState
from elastic.moves_end import fail
from elastic.moves_fence import fence, name_slices, shrink
from elastic.step_watch import ALL_WAIT
from elastic.turn import Turn

DETECTOR = "step-watchdog"
STACKS = "logs/worker-{}.stacks"
MORE_TIME = "Where steps may take that long, give --hang-after-s."


def note_commit(turn: Turn, event: Committed) -> None:
    """A step of this world is committed: the bound is learned from it."""
    if event.generation == turn.state.generation:
        watch, now_s = turn.state.watch, turn.now.mono_s
        turn.change(watch=watch.committed(event.generation, event.step, now_s, event.compile_s))


def note_stacks(turn: Turn, event: StacksTaken) -> None:
    """A worker has told where it is."""
    turn.change(watch=turn.state.watch.answered(event))


def look_for_hang(turn: Turn) -> None:
    """In a world that trains: whether its next step is overdue, and why."""
    state, now_s = turn.state, turn.now.mono_s
    floor_s, first_step_s = state.config.timing.hang_after_s, state.config.timing.first_step_s
    if floor_s is None or state.rehearsing or not _are_all_there(turn):
        return
    if state.watch.generation != state.generation:
        turn.change(watch=state.watch.restarted(state.generation, now_s))
    watch = turn.state.watch
    if watch.asked_s is None:
        if watch.is_overdue(now_s, floor_s, first_step_s):
            _ask(turn)
    elif watch.is_answered(state.world, now_s):
        _judge(turn, watch.bound_s(floor_s, first_step_s, ALL_WAIT))


def _are_all_there(turn: Turn) -> bool:
    """Whether steps are due, and every agent is there to ask."""
    members = [turn.state.member(index) for index in turn.state.world]
    return all(
        member.attached and member.worker is WorkerState.IN_WORLD and not (member.finished or member.left)
        for member in members
    )


def _ask(turn: Turn) -> None:
    turn.change(watch=turn.state.watch.asked(turn.now.mono_s))
    for index in turn.state.world:
        turn.send(TakeStacks(member=index, generation=turn.state.generation))


def _judge(turn: Turn, all_wait_s: float) -> None:
    watch, verdict = turn.state.watch.judge(turn.state.world)
    turn.change(watch=watch)
    waited_s = turn.now.mono_s - watch.progress_s
    if verdict == "missing":
        _end_missing(turn, waited_s)
    elif verdict == "all in the script":
        # An evaluation or a save of all: no slice keeps another waiting, so there is nothing to recover.
        _tell(turn, waited_s)
        turn.change(watch=watch.patient(2.0 * watch.patience))
    elif verdict == "all arrived" and waited_s >= all_wait_s:
        _try_once_more(turn, waited_s)
    elif verdict == "all arrived":
        _tell(turn, waited_s)
        turn.change(watch=watch.patient(ALL_WAIT))
    elif watch.looks:
        _ask(turn)


def _stacks(turn: Turn, index: int) -> str:
    return STACKS.format(turn.state.config.label(index))


def _tell(turn: Turn, waited_s: float) -> None:
    """Write down where everybody is while no step ends."""
    for index in turn.state.world:
        detail = f"no step for {waited_s:.0f} s: {turn.state.watch.where(index)}; see {_stacks(turn, index)}"
        turn.write_worker(index, "overdue", turn.state.member(index).worker_pid, detail)


def _end_missing(turn: Turn, waited_s: float) -> None:
    """The others wait in the runtime for these: they are lost, as if they had died."""
    watch, step = turn.state.watch, turn.state.newest_committed + 1
    _tell(turn, waited_s)
    missing = watch.missing or ()
    for index in missing:
        cause = (
            f"it hung, {watch.where(index)}, while the others waited {waited_s:.1f} s for step {step};"
            f" its stacks are in {_stacks(turn, index)}"
        )
        turn.change(last_cause=f"{turn.state.config.name(index)}: {cause}")
        turn.write_loss(index, cause, DETECTOR, turn.now.unix_s - waited_s)
        turn.end_worker(index, cause)
    shrink(turn, missing)


def _try_once_more(turn: Turn, waited_s: float) -> None:
    """All wait and no step ends: all leave (who cannot is replaced), once; the second time the job stops."""
    _tell(turn, waited_s)
    step = turn.state.newest_committed
    if turn.state.unexplained_at == step:
        stuck = name_slices(turn.state.world_slices)
        fail(
            turn,
            f"the step after {step} twice did not end within {waited_s:.0f} s, with {stuck} waiting in the"
            f" runtime; see {STACKS.format('N')}. {MORE_TIME}",
        )
        return
    turn.change(unexplained_at=step)
    fence(turn, f"no step for {waited_s:.0f} s, nobody is missing: once more from the snapshot")
