"""What each event says about a member, whatever the phase: the first half of a step of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic import moves_digest, moves_hang, moves_persist, moves_prepare, moves_shadow, quarantine
from elastic.events import (
    AgentAttached,
    AgentLost,
    Captured,
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
    ResetHost,
    ServiceLost,
    ServiceReady,
    SharePersisted,
    StacksTaken,
    Staged,
    StepFailed,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
    WorkerState,
)
from elastic.join_events import HostPrepared
from elastic.moves_audit import note_checksums, note_layout
from elastic.records import (
    MessageRefused,
    SnapshotRejected,
    SnapshotsVerified,
    StateRestored,
)
from elastic.shadow_events import ShadowServiceReady, ShadowTold
from elastic.state import Member
from elastic.turn import Turn

WARM = "it stood by, warm"
_OF_THIS_GENERATION = (
    StepFailed,
    StacksTaken,
    Fenced,
    Staged,
    Rebuilt,
    LeftWorld,
    Committed,
    LaidOut,
    Captured,
    Finished,
    DigestDone,
    ServiceReady,
    SharePersisted,
)


def is_stale(turn: Turn, event: Event) -> bool:
    """Whether the event comes from another generation and must be refused; refused steps are written down."""
    if isinstance(event, ServiceLost):  # a world may go on in the runtime of an older generation
        return event.generation != turn.state.runtime_generation
    if not isinstance(event, _OF_THIS_GENERATION) or event.generation == turn.state.generation:
        return False
    is_restore = isinstance(event, DigestDone) and event.purpose != "final"
    if (isinstance(event, Committed) or is_restore) and event.generation == turn.state.world_generation:
        return False  # of the world that is being left: what it did commit, and how it was restored
    if isinstance(event, Committed | Finished):
        turn.write(
            MessageRefused(
                unix_s=turn.now.unix_s,
                generation=turn.state.generation,
                sender=turn.state.config.name(event.member),
                reason=f"{type(event).__name__} of step {event.step} from generation {event.generation}",
            )
        )
    return True


def observe(turn: Turn, event: Event) -> None:
    """Change the members' records by what the event says."""
    observer = _OBSERVERS.get(type(event))
    if observer is not None:
        observer(turn, event)


def _agent_attached(turn: Turn, event: AgentAttached) -> None:
    index = event.member
    member = turn.state.member(index)
    known = member.worker in (WorkerState.IN_WORLD, WorkerState.READY)
    found = event.worker in (WorkerState.IN_WORLD, WorkerState.READY)
    same = known and found and event.worker_pid == member.worker_pid
    is_new_agent = not event.agent_pid or event.agent_pid != member.agent_pid
    turn.change(uncovered="")
    if turn.is_world_away():
        _wait_anew(turn)
    turn.update(index, attached=True, gone_since_s=None, agent_pid=event.agent_pid)
    if same:
        # Adopted by a new agent, or heard again: nothing was lost, unless it left its world meanwhile.
        if event.worker is WorkerState.READY:
            turn.update(index, worker=WorkerState.READY)
        if is_new_agent:
            turn.write_worker(index, "adopted", event.worker_pid)
            moves_persist.lose_shares(turn, index)
            moves_digest.ask_again(turn, index)
        moves_persist.repeat_settled(turn, index)
    elif _got_ready(member, event):
        _worker_ready(turn, WorkerReady(member=index, pid=event.worker_pid))
    else:
        if known:
            cause = event.lost_cause or "the worker ended while its agent was away"
            quarantine.lost(turn, index, cause)
            _lose_worker(turn, index, cause, "agent-restart", turn.now.unix_s)
        if found:
            # A worker this job does not count on. Until its host attaches without it, the host is not there.
            turn.update(index, attached=False, worker=WorkerState.NONE, snapshots=(), fenced=False)
            turn.send(ResetHost(member=index))
            return
        turn.update(index, worker=event.worker, worker_pid=event.worker_pid, respawning=False)
    turn.repeat_orders(index)


def _got_ready(member: Member, event: AgentAttached) -> bool:
    """Whether the worker that was being started has reached its session while nobody listened."""
    is_ready = member.worker is WorkerState.STARTING and event.worker is WorkerState.READY
    return is_ready and event.worker_pid != member.ended_pid


def _wait_anew(turn: Turn) -> None:
    """The first of a world that could not be reached is back: so may the others be in a moment."""
    for other in turn.state.members:
        if other.gone_since_s is not None:
            turn.update(other.index, gone_since_s=turn.now.mono_s)


def _agent_lost(turn: Turn, event: AgentLost) -> None:
    if turn.state.member(event.member).attached:
        turn.update(
            event.member,
            attached=False,
            gone_since_s=turn.now.mono_s,
            last_life_unix_s=event.last_life_unix_s,
        )


def _worker_ready(turn: Turn, event: WorkerReady) -> None:
    if event.pid == turn.state.member(event.member).ended_pid:
        return  # it was ended since
    turn.update(
        event.member,
        worker=WorkerState.READY,
        worker_pid=event.pid,
        start_by_s=None,
        finished=False,
        left=False,
        fresh=True,
        respawning=False,
        prepare_by_s=None,
        prepared=False,
    )
    turn.write_worker(event.member, "ready", event.pid, WARM if event.was_warm else "")


def _worker_lost(turn: Turn, event: WorkerLost) -> None:
    member = turn.state.member(event.member)
    earlier = member.worker_pid and event.pid != member.worker_pid
    turn.write_worker(event.member, "ended", event.pid, event.cause)
    if event.pid and (earlier or event.pid == member.ended_pid):
        return  # it counts as gone already
    _note_death(turn, event)
    if event.aborted and turn.state.phase is Phase.FENCING and _was_inside(turn, member):
        # The runtime could not take the loss of a peer and ended the process, in its world or just after it
        # had left: the host itself is well.
        turn.plan_restart(event.member)
        turn.start_worker(event.member)
        turn.update(event.member, respawning=True)
        turn.write_worker(event.member, "respawned", 0, event.cause)
        return
    if not event.aborted:  # else a peer's loss may have ended it
        quarantine.lost(turn, event.member, event.cause)
    _lose_worker(turn, event.member, event.cause, event.detector, event.last_life_unix_s)


def _was_inside(turn: Turn, member: Member) -> bool:
    is_here = member.worker in (WorkerState.IN_WORLD, WorkerState.READY)
    return is_here and member.index in turn.state.world


def _note_death(turn: Turn, event: WorkerLost) -> None:
    """Remember at which step a worker was killed in a running world (an abort may be a peer's loss)."""
    state = turn.state
    running = state.phase in (Phase.RUNNING, Phase.REPLAYING, Phase.SUSPECT) and not state.rehearsing
    is_inside = state.member(event.member).worker is WorkerState.IN_WORLD
    if event.killed_by and not event.aborted and running and is_inside:
        deaths = state.deaths.died(
            state.newest_committed, state.generation, event.member, event.killed_by, event.evidence
        )
        turn.change(deaths=deaths)


def _lose_worker(turn: Turn, index: int, cause: str, detector: str, last_life_unix_s: float) -> None:
    member = turn.state.member(index)
    turn.change(last_cause=f"{turn.state.config.name(index)}: {cause}")
    if index in turn.state.world and member.worker in (WorkerState.IN_WORLD, WorkerState.READY):
        turn.write_loss(index, cause, detector, last_life_unix_s)
    turn.plan_restart(index)


def _worker_failed(turn: Turn, event: WorkerFailed) -> None:
    turn.write_worker(event.member, "failed", 0, event.error)


def _preemption(turn: Turn, event: PreemptionNotice) -> None:
    if turn.state.member(event.member).worker is WorkerState.NONE:
        return
    turn.update(event.member, leaving=True)
    turn.write_worker(event.member, "leaving", 0, "told to leave (SIGTERM)")


def _fenced(turn: Turn, event: Fenced) -> None:
    turn.update(event.member, fenced=True, snapshots=event.snapshots)
    member = turn.state.member(event.member)
    is_leaving = turn.state.phase is Phase.FENCING and member.worker is WorkerState.IN_WORLD
    if is_leaving and event.worker is WorkerState.READY:
        turn.update(event.member, worker=WorkerState.READY, finished=False)
        turn.write_worker(event.member, "unwound", member.worker_pid)
    _write_rejected(turn, event.member, event.rejected)
    for snapshot in event.snapshots:
        turn.write(
            SnapshotsVerified(
                unix_s=turn.now.unix_s,
                generation=turn.state.generation,
                **turn.place(event.member),
                step=snapshot.step,
                num_shards=len(snapshot.holdings),
            )
        )


def _write_rejected(turn: Turn, index: int, reasons: tuple[str, ...]) -> None:
    for reason in reasons:
        turn.write(
            SnapshotRejected(
                unix_s=turn.now.unix_s,
                generation=turn.state.generation,
                **turn.place(index),
                step=None,
                reason=reason,
            )
        )


def _staged(turn: Turn, event: Staged) -> None:
    _write_rejected(turn, event.member, event.rejected)
    turn.update(event.member, done=not event.error)
    if event.error:
        turn.stage_error = event.error


def _rebuilt(turn: Turn, event: Rebuilt) -> None:
    snapshots = () if event.snapshot is None else (event.snapshot,)
    is_told_again = turn.state.member(event.member).done
    turn.update(event.member, done=True, snapshots=snapshots)
    if is_told_again:
        return
    if not turn.state.rehearsing:
        quarantine.joined(turn, event.member)
    turn.write_worker(event.member, "rebuilt", turn.state.member(event.member).worker_pid)
    if event.snapshot is not None:
        turn.write(
            StateRestored(
                unix_s=turn.now.unix_s,
                generation=event.generation,
                **turn.place(event.member),
                step=event.snapshot.step,
                bytes_from=event.bytes_from,
                form_s=event.form_s,
                restore_s=event.restore_s,
            )
        )


def _committed(turn: Turn, event: Committed) -> None:
    if turn.state.rehearsing:
        return
    moves_hang.note_commit(turn, event)
    if event.checksums and event.generation == turn.state.generation:
        index, generation = event.member, event.generation
        note_checksums(
            turn,
            Captured(member=index, generation=generation, step=event.step, checksums=event.checksums),
        )
    if event.step > turn.state.newest_before and turn.state.member(event.member).starts:
        turn.update(event.member, starts=0)
    if event.step > turn.state.newest_committed:
        turn.change(newest_committed=event.step)


def _left(turn: Turn, event: LeftWorld) -> None:
    turn.update(event.member, left=True)


def _finished(turn: Turn, event: Finished) -> None:
    turn.update(event.member, finished=True, snapshots=event.snapshots)
    if turn.state.finish_by_s is None:
        turn.change(finish_by_s=turn.now.mono_s + turn.state.config.timing.finish_s)
    turn.change(finished_step=event.step, newest_committed=max(turn.state.newest_committed, event.step))


def _service_ready(turn: Turn, event: ServiceReady) -> None:
    turn.change(service_generation=event.generation, service_address=event.address)


_OBSERVERS: dict[type[Any], Callable[[Turn, Any], None]] = {
    AgentAttached: _agent_attached,
    AgentLost: _agent_lost,
    WorkerReady: _worker_ready,
    WorkerLost: _worker_lost,
    WorkerFailed: _worker_failed,
    PreemptionNotice: _preemption,
    Fenced: _fenced,
    Staged: _staged,
    Rebuilt: _rebuilt,
    Committed: _committed,
    LaidOut: note_layout,
    Captured: note_checksums,
    LeftWorld: _left,
    Finished: _finished,
    DigestDone: moves_digest.note,
    ServiceReady: _service_ready,
    SharePersisted: moves_persist.observe_share,
    Persisted: moves_persist.observe_persisted,
    PersistedFound: moves_persist.observe_found,
    StacksTaken: moves_hang.note_stacks,
    ShadowTold: moves_shadow.hear,
    HostPrepared: moves_prepare.hear,
    ShadowServiceReady: moves_shadow.hear_service,
}
