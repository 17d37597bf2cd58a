"""The recovery state machine: `(state, event, now) → (state, commands)`, pure and total.

Each event first becomes a fact about a member (`elastic.facts`), in whatever phase; then the table says what
the phase does about it. A loss in any phase starts the next generation from what survives. The
`elastic.moves_*` modules hold what the machine does; they import each other one way: `service` → `restore` →
`run` → `hang`, `suspect`, `corrupt` → `fence` → `digest` → `decide` → `end` → `audit`.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic import (
    facts,
    moves_audit,
    moves_corrupt,
    moves_end,
    moves_fence,
    moves_restore,
    moves_run,
    moves_service,
    moves_suspect,
)
from elastic.events import (
    AgentAttached,
    AgentLost,
    Captured,
    Command,
    Committed,
    DigestDone,
    Event,
    Fenced,
    Finished,
    LaidOut,
    LeftWorld,
    Persisted,
    PersistedFound,
    Phase,
    PreemptionNotice,
    Rebuilt,
    ServiceLost,
    ServiceReady,
    SharePersisted,
    StacksTaken,
    Staged,
    StepFailed,
    StopRequested,
    Tick,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from elastic.join_events import HostPrepared
from elastic.shadow_events import ShadowServiceReady, ShadowTold
from elastic.state import JobState
from elastic.turn import Clock, Turn

Reaction = Callable[[Turn, Event], None]


def ignore(turn: Turn, event: Event) -> None:
    """The event changes nothing in this phase beyond the fact."""


def advance(turn: Turn, event: Event) -> None:
    """Look for losses, and whether the phase has all it waits for."""
    _ADVANCE[turn.state.phase](turn)


def count_death(turn: Turn, event: Event) -> None:
    """A worker is gone: a loss, unless workers are killed at this step whatever is tried."""
    config = turn.state.config
    if stop := turn.state.deaths.verdict(config.max_deaths_at_step, config.hosts_per_slice):
        moves_end.fail(turn, stop)
    else:
        advance(turn, event)


def suspect(turn: Turn, event: Event) -> None:
    """A step failed; a loss should explain it soon."""
    assert isinstance(event, StepFailed)
    moves_suspect.suspect(turn, event)


def hear_probe(turn: Turn, event: Event) -> None:
    """Another slice's step failed as well, or a probe has found how a slice's devices are."""
    assert isinstance(event, StepFailed)
    moves_suspect.hear(turn, event)


def count_commit(turn: Turn, event: Event) -> None:
    """A step is done: what its capture's checksums say, and whatever the phase waits for."""
    if not moves_corrupt.throw_out(turn):
        moves_audit.order_audit(turn)
        advance(turn, event)


def order_audit(turn: Turn, event: Event) -> None:
    """Throw out who has a wrong copy; have everything on the devices compared, if copies only disagreed."""
    if not moves_corrupt.throw_out(turn):
        moves_audit.order_audit(turn)


def fail(turn: Turn, event: Event) -> None:
    """The job cannot go on: stop everything with the reason."""
    if isinstance(event, WorkerFailed):
        moves_end.fail(
            turn,
            f"the training script failed on {turn.state.config.name(event.member)}: {event.error}",
            exit_status=event.exit_status,
        )
    elif isinstance(event, StopRequested):
        moves_end.fail(turn, event.reason)


def release(turn: Turn, event: Event) -> None:
    """The job is over, which this host does not know yet."""
    assert isinstance(event, AgentAttached)
    moves_end.release(turn, event.member)


EVENTS: tuple[type[Event], ...] = (
    AgentAttached,
    AgentLost,
    WorkerReady,
    WorkerLost,
    StepFailed,
    StacksTaken,
    WorkerFailed,
    PreemptionNotice,
    Fenced,
    Staged,
    Rebuilt,
    Committed,
    LaidOut,
    Captured,
    LeftWorld,
    Finished,
    DigestDone,
    SharePersisted,
    Persisted,
    ServiceReady,
    ServiceLost,
    PersistedFound,
    ShadowTold,
    ShadowServiceReady,
    HostPrepared,
    StopRequested,
    Tick,
)

_ALWAYS: dict[type[Event], Reaction] = {
    AgentAttached: advance,
    AgentLost: advance,
    WorkerReady: advance,
    WorkerLost: count_death,
    StepFailed: ignore,
    StacksTaken: ignore,
    WorkerFailed: fail,
    PreemptionNotice: ignore,
    Fenced: ignore,
    Staged: ignore,
    Rebuilt: ignore,
    Committed: ignore,
    LaidOut: ignore,
    Captured: ignore,
    LeftWorld: ignore,
    Finished: ignore,
    DigestDone: ignore,
    SharePersisted: ignore,
    Persisted: ignore,
    ServiceReady: ignore,
    ServiceLost: ignore,
    PersistedFound: ignore,
    ShadowTold: ignore,
    ShadowServiceReady: ignore,
    HostPrepared: ignore,
    StopRequested: fail,
    Tick: advance,
}
_WITH_SERVICE: dict[type[Event], Reaction] = {ServiceReady: advance, ServiceLost: moves_service.leave_service}
_NOTHING: dict[type[Event], Reaction] = dict.fromkeys(EVENTS, ignore)
_ENDED = _NOTHING | {AgentAttached: release}

TABLE: dict[Phase, dict[type[Event], Reaction]] = {
    Phase.WAITING: _ALWAYS | {Persisted: advance},
    Phase.RUNNING: _ALWAYS
    | {
        StepFailed: suspect,
        ServiceLost: moves_service.leave_service,
        StacksTaken: advance,
        PreemptionNotice: advance,
        Committed: count_commit,
        Captured: order_audit,
        LeftWorld: advance,
        Finished: advance,
        DigestDone: advance,
        SharePersisted: advance,
        Persisted: advance,
        HostPrepared: advance,
    },
    Phase.SUSPECT: _ALWAYS | {StepFailed: hear_probe, ServiceLost: moves_service.leave_service},
    Phase.FENCING: _ALWAYS | {Fenced: advance},
    Phase.PLANNING: _ALWAYS | _WITH_SERVICE,
    Phase.RESTORING: _ALWAYS | _WITH_SERVICE | {Staged: advance},
    Phase.REBUILDING: _ALWAYS
    | _WITH_SERVICE
    | {
        Rebuilt: advance,
        StepFailed: suspect,
        LaidOut: moves_restore.lay_out_anew,
    },
    Phase.REPLAYING: _ALWAYS
    | {
        StepFailed: suspect,
        ServiceLost: moves_service.leave_service,
        StacksTaken: advance,
        Committed: count_commit,
        Captured: order_audit,
        LeftWorld: advance,
        Finished: advance,
        DigestDone: advance,
    },
    Phase.COMPLETED: _ENDED,
    Phase.FAILED: _ENDED,
}
"""What each phase does about each event; a test proves that no pair is missing."""

_ADVANCE: dict[Phase, Callable[[Turn], None]] = {
    Phase.WAITING: moves_run.advance_waiting,
    Phase.RUNNING: moves_run.advance_running,
    Phase.SUSPECT: moves_suspect.advance_suspect,
    Phase.FENCING: moves_fence.advance_fencing,
    Phase.PLANNING: moves_restore.advance_planning,
    Phase.RESTORING: moves_restore.advance_restoring,
    Phase.REBUILDING: moves_restore.advance_rebuilding,
    Phase.REPLAYING: moves_restore.advance_replaying,
    Phase.COMPLETED: lambda turn: None,
    Phase.FAILED: lambda turn: None,
}


def step(state: JobState, event: Event, now: Clock) -> tuple[JobState, tuple[Command, ...]]:
    """What the job does about one event: its next state and the commands to perform, in order."""
    turn = Turn(state, now)
    if state.phase in (Phase.COMPLETED, Phase.FAILED):
        TABLE[state.phase][type(event)](turn, event)
        return turn.state, tuple(turn.commands)
    if facts.is_stale(turn, event):
        return turn.state, tuple(turn.commands)
    facts.observe(turn, event)
    if isinstance(event, AgentAttached) and event.generation > turn.state.generation:
        moves_fence.overtake(turn, event.generation)
    if turn.state.reconvening and not turn.is_reconvening():
        turn.change(reconvening=False)
    TABLE[turn.state.phase][type(event)](turn, event)
    return turn.state, tuple(turn.commands)
