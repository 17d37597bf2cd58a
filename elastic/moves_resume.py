"""A coordinator takes over from one that is gone: what goes on as it was, and what is done anew. Pure."""

from __future__ import annotations

from elastic.events import Command, Phase
from elastic.moves_fence import fence
from elastic.saved_state import SavedState
from elastic.state import JobState
from elastic.turn import Clock, Turn


def resume(state: JobState, now: Clock) -> tuple[JobState, tuple[Command, ...]]:
    """Begin with a state that `elastic.saved_state.restore` made.

    A world that trains goes on: its members attach again, with their workers in it. Whatever else was under
    way begins anew, in the next generation, with what the agents hold; nothing is decided while hosts that
    were there may still be on their way. A job that waited, or is over, still does, or is.
    """
    turn = Turn(state, now)
    if state.phase in (Phase.COMPLETED, Phase.FAILED):
        turn.change(reconvening=False)
    elif state.phase is not Phase.WAITING and not trains(state):
        _begin_anew(turn)
    return turn.state, tuple(turn.commands)


def trains(state: JobState | SavedState) -> bool:
    """Whether its world trains, and what its restore still owed is known: then it goes on.

    In REPLAYING the check of the restored state may have been lost on its way: then it is restored once more.
    """
    if state.phase is Phase.RUNNING:
        return True
    is_checked = state.newest_before < 0 or None not in (state.captured_digest, state.restored_digest)
    return state.phase is Phase.REPLAYING and is_checked


def _begin_anew(turn: Turn) -> None:
    state = turn.state
    respawning = [member.index for member in state.members if member.respawning]
    fence(turn, f"another coordinator takes over from {state.phase.value}")
    timing = state.config.timing
    for index in respawning:
        turn.update(index, respawning=True)
    # Hosts have to come here first, then to leave their world.
    turn.change(deadline_s=turn.now.mono_s + timing.agent_grace_s + timing.unwind_s)
