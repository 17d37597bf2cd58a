"""What of the machine's state outlives its coordinator: the values to write down, and the state that follows
from them. Pure.

Kept is what agents cannot tell: who is in the world, what was restored when, what was counted. Not kept is
what they tell again when they attach (`elastic.agent_said`), or report anew when they are fenced: snapshots,
the choice among them, who has finished. Moments are kept as seconds from now, as the next coordinator has
another clock; the time without one does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elastic.copy_check import CopyCheck
from elastic.events import Phase, SnapshotSummary, WorkerState
from elastic.repeated_deaths import Deaths
from elastic.state import Config, JobState, Member
from elastic.step_watch import StepWatch
from reshard.batch_sizes import NewSteps
from reshard.layout import Layout

Digest = tuple[int, int, str]
_MEMBER_MOMENTS = ("start_by_s", "joined_s", "quarantined_until_s")
_MEMBER_VALUES = (
    "index", "worker", "worker_pid", "agent_pid", "ended_pid", "starts", "start_at_step",
    "losses_in_row", "done", "leaving", "respawning", "fresh",
)  # fmt: skip
_JOB_MOMENTS = ("deadline_s", "waiting_until_s")
_JOB_VALUES = (
    "phase", "generation", "world", "seats", "idle", "layouts", "rehearsing", "rehearsals_left", "started",
    "newest_before", "restored_steps", "new_steps", "world_generation", "runtime_generation",
    "runtime_is_up", "runtime_refusals", "service_generation",
    "service_address", "overtime", "joining", "stop_step", "unexplained_at", "stage_failures",
    "finished_step", "captured_digest", "restored_digest", "final_digest", "persist_settled_step",
    "persist_left_out_step", "persist_failed_step", "memory_given_up", "last_cause", "deaths", "error",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMember:
    """One slice; the fields are those of `elastic.state.Member`, moments in seconds from the saving."""

    index: int
    was_attached: bool
    gone_since_s: float | None
    worker: WorkerState
    worker_pid: int
    agent_pid: int
    ended_pid: int
    starts: int
    start_at_step: int | None
    losses_in_row: int
    done: bool
    leaving: bool
    respawning: bool
    fresh: bool
    start_by_s: float | None
    joined_s: float | None
    quarantined_until_s: float | None
    last_life_unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A job; the fields are those of `elastic.state.JobState`, moments in seconds from the saving."""

    members: tuple[SavedMember, ...]
    phase: Phase
    generation: int
    world: tuple[int, ...]
    seats: tuple[int, ...]
    idle: tuple[int, ...]
    layouts: tuple[tuple[int, Layout], ...]
    rehearsing: bool
    rehearsals_left: int
    started: bool
    newest_committed: int
    newest_before: int
    restored_steps: tuple[tuple[int, int], ...]
    new_steps: tuple[NewSteps, ...]
    world_generation: int
    runtime_generation: int
    runtime_is_up: bool
    runtime_refusals: int
    service_generation: int
    service_address: str
    overtime: bool
    joining: bool
    stop_step: int | None
    unexplained_at: int | None
    stage_failures: int
    finished_step: int | None
    captured_digest: Digest | None
    restored_digest: Digest | None
    final_digest: str | None
    persist_settled_step: int
    persist_left_out_step: int
    persist_failed_step: int
    memory_given_up: bool
    last_cause: str
    deaths: Deaths
    error: str
    deadline_s: float | None
    waiting_until_s: float | None
    persisted: tuple[tuple[int, int], ...]
    """Step and generation of each snapshot in the persistent tier; what else is known of them is on disk."""
    copies: CopyCheck
    intervals_s: tuple[float, ...]
    """What the step watchdog has learned."""


def save(state: JobState, now_s: float) -> SavedState:
    """What the next coordinator must know of `state`, at `now_s` of this coordinator's clock."""
    return _saved(state, now_s, volatile=True)


def durable_part(state: JobState) -> SavedState:
    """Of two states with the same durable part, the later one need not be written down: what differs is told
    again, or is in the history, or does no harm when it is a little old (who was attached, whose start was
    counted).
    """
    part = _saved(state, 0.0, volatile=False)
    if state.phase in (Phase.RUNNING, Phase.REPLAYING):
        return part
    # The next coordinator fences anew: what agents find running, they tell.
    members = tuple(
        replace(member, worker=WorkerState.NONE, worker_pid=0, agent_pid=0, done=False, fresh=False)
        for member in part.members
    )
    return replace(part, members=members, service_generation=0, service_address="", deadline_s=None)


def _saved(state: JobState, now_s: float, *, volatile: bool) -> SavedState:
    fields = {name: getattr(state, name) for name in _JOB_VALUES}
    fields |= {name: _ahead(getattr(state, name), now_s) for name in _JOB_MOMENTS}
    return SavedState(
        members=tuple(_saved_member(member, now_s, volatile=volatile) for member in state.members),
        newest_committed=state.newest_committed if volatile else -1,
        persisted=tuple((one.step, one.generation) for one in state.persisted),
        copies=_saved_copies(state.copies, volatile=volatile),
        intervals_s=state.watch.intervals_s if volatile else (),
        **fields,
    )


def _saved_member(member: Member, now_s: float, *, volatile: bool) -> SavedMember:
    fields = {name: getattr(member, name) for name in _MEMBER_VALUES}
    fields |= {name: _ahead(getattr(member, name), now_s) for name in _MEMBER_MOMENTS}
    saved = SavedMember(
        was_attached=member.attached,
        gone_since_s=_ahead(member.gone_since_s, now_s),
        last_life_unix_s=member.last_life_unix_s,
        **fields,
    )
    if volatile:
        return saved
    return replace(
        saved, was_attached=False, gone_since_s=None, last_life_unix_s=0.0, starts=0, start_by_s=None
    )


def _saved_copies(copies: CopyCheck, *, volatile: bool) -> CopyCheck:
    """What was found; an audit that was ordered is ordered again."""
    return CopyCheck(
        hosts_per_slice=copies.hosts_per_slice,
        generation=copies.generation if volatile else 0,
        newest_done=copies.newest_done if volatile else (-1, -1),
        wants_audit=copies.wants_audit or copies.audit_step is not None,
        is_audited=copies.is_audited,
        audited_paths=copies.audited_paths,
        num_untold=copies.num_untold if volatile else 0,
        num_told=copies.num_told if volatile else 0,
        named=copies.named,
        convicted=copies.convicted,
        differed_since=copies.differed_since,
    )


def restore(
    saved: SavedState, config: Config, now_s: float, found: tuple[SnapshotSummary, ...] = ()
) -> JobState:
    """The state of a coordinator that takes over at `now_s` of its clock, with no agent attached yet.

    `found` is what is in the persistent tier; what this job has not saved as its own, earlier ones left.
    """
    generations = dict(saved.persisted)
    persisted = tuple(replace(one, generation=generations.get(one.step, 0)) for one in found)
    fields: dict[str, Any] = {name: getattr(saved, name) for name in _JOB_VALUES}
    fields |= {name: _moment(getattr(saved, name), now_s) for name in _JOB_MOMENTS}
    return JobState(
        config=config,
        members=tuple(_restore_member(member, now_s) for member in saved.members),
        newest_committed=saved.newest_committed,
        persisted=persisted,
        copies=saved.copies,
        watch=StepWatch(generation=saved.generation, progress_s=now_s, intervals_s=saved.intervals_s),
        reconvening=True,
        **fields,
    )


def _restore_member(saved: SavedMember, now_s: float) -> Member:
    fields: dict[str, Any] = {name: getattr(saved, name) for name in _MEMBER_VALUES}
    fields |= {name: _moment(getattr(saved, name), now_s) for name in _MEMBER_MOMENTS}
    gone_since_s = now_s if saved.was_attached else _moment(saved.gone_since_s, now_s)
    return Member(gone_since_s=gone_since_s, last_life_unix_s=saved.last_life_unix_s, **fields)


def _ahead(moment_s: float | None, now_s: float) -> float | None:
    return None if moment_s is None else moment_s - now_s


def _moment(ahead_s: float | None, now_s: float) -> float | None:
    return None if ahead_s is None else now_s + ahead_s
