"""The runtime service of a world is gone: its workers cannot outlive it, the memory of all hosts does."""

from __future__ import annotations

from elastic.events import EndWorker, Event, Phase, ServiceLost, WorkerState
from elastic.moves_fence import fence
from elastic.moves_restore import try_again
from elastic.turn import Turn

DOOMED = "its runtime service is gone, and the runtime ends it"


def leave_service(turn: Turn, event: Event) -> None:
    """A new generation, of the same slices, with new workers for those that were inside the world.

    The runtime ends every process that was connected (SIGABRT), at once or in a moment, and also one that has
    left the world meanwhile. Waiting to see which of them it reaches first would take late ones for losses.
    """
    assert isinstance(event, ServiceLost)
    inside = turn.state.members_with(WorkerState.IN_WORLD)
    why = f"the runtime service of generation {event.generation} {event.cause}"
    if turn.state.phase in (Phase.RUNNING, Phase.SUSPECT):
        fence(turn, why)
    else:
        try_again(turn, why)
    if turn.state.phase is Phase.FENCING:
        for index in inside:
            _replace(turn, index)


def _replace(turn: Turn, index: int) -> None:
    member = turn.state.member(index)
    if not member.attached or member.worker is not WorkerState.IN_WORLD:
        return  # whoever is away is looked after by the fencing
    turn.send(EndWorker(member=index, why=DOOMED))
    turn.plan_restart(index)
    turn.start_worker(index)
    turn.update(index, respawning=True)
    turn.write_worker(index, "respawned", 0, DOOMED)
