"""The end of a job: completed or failed, everybody told."""

from __future__ import annotations

from elastic.choose import choose_persisted, choose_restore
from elastic.events import Phase, Shutdown
from elastic.moves_audit import tell_comparisons
from elastic.moves_shadow import give_up
from elastic.records import RunEnded
from elastic.turn import Turn


def complete(turn: Turn) -> None:
    """Everything is done: write the end and let all go."""
    turn.enter(Phase.COMPLETED)
    _end(turn, "completed", "")


def fail(turn: Turn, error: str, *, exit_status: int = 1) -> None:
    """Stop everything, with the reason and what the command shall exit with."""
    restorable_step = _restorable_step(turn)
    turn.change(error=error)
    turn.enter(Phase.FAILED, error)
    _end(turn, "failed", error, exit_status, restorable_step)


def release(turn: Turn, index: int) -> None:
    """Tell a host that the job is over."""
    completed = turn.state.phase is Phase.COMPLETED
    turn.send(Shutdown(member=index, completed=completed))


def describe_state_left(turn: Turn) -> str:
    """What is left of the committed steps, in the memory of the hosts at hand or in the persistent tier, as
    the end of a sentence.
    """
    state = turn.state
    if state.newest_committed < 0:
        return "no step had been committed"
    restored_steps = dict(state.restored_steps)
    choice, why = choose_restore(state.held(), restored_steps, state.copies.named)
    if choice is None and (persisted := choose_persisted(state.persisted, restored_steps)) is not None:
        return f"the state of step {persisted.step} is left in the persistent tier ({why})"
    if choice is None:
        steps = state.newest_committed + 1
        return f"the state is lost, and {steps} committed step{'s' * (steps > 1)} with it ({why})"
    return f"the state of step {choice.step} was left in the hosts' memory"


def _restorable_step(turn: Turn) -> int | None:
    """The newest step whose snapshot is whole (-1: none); None while a world runs and nobody has looked."""
    state = turn.state
    looked = state.phase in (Phase.WAITING, Phase.FENCING, Phase.PLANNING, Phase.RESTORING)
    if not looked or any(member.attached and not member.fenced for member in state.members):
        return None
    restored_steps = dict(state.restored_steps)
    choice, _ = choose_restore(state.held(), restored_steps, state.copies.named)
    choice = choice or choose_persisted(state.persisted, restored_steps)
    return choice.step if choice else -1


def _end(
    turn: Turn, outcome: str, error: str, exit_status: int = 0, restorable_step: int | None = None
) -> None:
    tell_comparisons(turn)
    give_up(turn)
    state = turn.state
    turn.write(
        RunEnded(
            unix_s=turn.now.unix_s,
            generation=state.generation,
            outcome=outcome,
            error=error,
            final_step=state.newest_committed,
            state_digest=state.final_digest or "",
            exit_status=exit_status,
            restorable_step=restorable_step,
        )
    )
    for member in state.members:
        if member.attached:
            release(turn, member.index)
