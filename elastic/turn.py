"""One step of the machine under way: the state as it changes and the commands so far.

Pure outside, convenient inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elastic import quarantine
from elastic.events import (
    AgentCommand,
    Command,
    EndWorker,
    Fence,
    Phase,
    StartService,
    StartWorker,
    StopAfter,
    WorkerState,
    Write,
)
from elastic.records import LossDetected, PhaseEntered, Record, WorkerEvent
from elastic.shadow_events import EndShadowService, StartShadowService
from elastic.state import JobState, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The moment of an event: monotonic seconds (for deadlines) and Unix seconds (for the history)."""

    mono_s: float
    unix_s: float


def no_session(after_s: float) -> str:
    """What is wrong with a worker that has not come to its session."""
    return f"the script has not called elastic.session() in {after_s:.0f} s"


class Turn:
    """The working copy that the reactions to one event share."""

    def __init__(self, state: JobState, now: Clock) -> None:
        self.state = state
        self.now = now
        self.commands: list[Command] = []
        self.stage_error = ""

    def change(self, **changes: Any) -> None:
        """Change fields of the job's state."""
        self.state = replace(self.state, **changes)

    def update(self, index: int, **changes: Any) -> None:
        """Change fields of one member."""
        self.state = self.state.with_member(index, **changes)

    def send(self, command: AgentCommand | StartService | StartShadowService | EndShadowService) -> None:
        """Add a command for the shell to perform."""
        self.commands.append(command)

    def write(self, record: Record) -> None:
        """Add a record to the history."""
        self.commands.append(Write(record=record))

    def place(self, index: int) -> dict[str, int]:
        """The fields of a record that say where a member is."""
        host = self.state.config.host(index)
        return {"slice_index": host.slice_index, "host_index": host.host_index}

    def write_worker(self, index: int, state: str, pid: int, detail: str = "") -> None:
        """Add to the history what a worker did."""
        self.write(
            WorkerEvent(
                unix_s=self.now.unix_s,
                generation=self.state.generation,
                **self.place(index),
                state=state,
                pid=pid,
                detail=detail,
            )
        )

    def write_loss(self, index: int, cause: str, detector: str, last_life_unix_s: float) -> None:
        """Add to the history that the world has lost a host, and its slice with it."""
        self.write(
            LossDetected(
                unix_s=self.now.unix_s,
                generation=self.state.generation,
                **self.place(index),
                cause=cause,
                detector=detector,
                last_life_unix_s=last_life_unix_s,
            )
        )

    def enter(self, phase: Phase, why: str = "", *, within_s: float | None = None) -> None:
        """Change the phase; `within_s` bounds how long it may take."""
        self.change(phase=phase, deadline_s=None if within_s is None else self.now.mono_s + within_s)
        self.write(
            PhaseEntered(unix_s=self.now.unix_s, generation=self.state.generation, phase=phase.value, why=why)
        )

    def is_late(self) -> bool:
        """Whether the phase's bound has passed."""
        return self.is_past(self.state.deadline_s)

    def is_past(self, moment_s: float | None) -> bool:
        """Whether a moment has come; None never does."""
        return moment_s is not None and self.now.mono_s >= moment_s

    def repeat_orders(self, index: int) -> None:
        """Tell an agent that has just attached what it may have missed."""
        state = self.state
        if state.phase is Phase.FENCING:
            keeps = state.runtime_is_up
            self.send(Fence(member=index, generation=state.generation, keep_runtime=keeps))
        elif state.joining and state.stop_step is not None and index in state.world:
            self.send(StopAfter(member=index, generation=state.generation, step=state.stop_step))

    # ---- workers that start and end ------------------------------------------------------------------------

    def plan_restart(self, index: int) -> None:
        """The host has no worker any more; plan when it may get another."""
        after = self.state.config.rejoin_after_steps
        member = self.state.member(index)
        self.update(
            index,
            worker=WorkerState.NONE,
            worker_pid=0,
            ended_pid=member.worker_pid or member.ended_pid,
            start_by_s=None,
            finished=False,
            leaving=False,
            respawning=False,
            start_at_step=None if after is None else self.state.newest_committed + after,
        )

    def end_worker(self, index: int, why: str) -> None:
        """End a worker that is in the way; another is started when its time comes."""
        self.send(EndWorker(member=index, why=why))
        self.plan_restart(index)

    def start_worker(self, index: int, *, is_awaited: bool = True) -> None:
        """Start a worker, with a bound for its start."""
        starts = self.state.member(index).starts + 1
        start_by_s = self.now.mono_s + self.state.config.timing.start_s
        hint_at_s = self.now.mono_s + self.state.config.timing.session_hint_s
        self.update(
            index, worker=WorkerState.STARTING, starts=starts, start_by_s=start_by_s, hint_at_s=hint_at_s
        )
        self.send(StartWorker(member=index, is_awaited=is_awaited))

    def start_due(self, *, at_once: bool = False) -> None:
        """Start the workers whose time has come; `at_once` when no steps are made they could wait for."""
        for member in self.state.members:
            if not member.attached:
                continue
            if member.worker is WorkerState.STARTING:
                self._look_at_start(member)
                member = self.state.member(member.index)
            if member.worker is not WorkerState.NONE or not self.may_start(member):
                continue
            is_due = self.state.newest_committed >= (member.start_at_step or 0)
            is_kept_away = not self.is_past(member.quarantined_until_s or self.now.mono_s)
            if at_once or (is_due and not is_kept_away):
                is_awaited = at_once or self.state.phase is not Phase.RUNNING
                self.start_worker(member.index, is_awaited=is_awaited)
                self.write_worker(member.index, "started", 0)

    def _look_at_start(self, member: Member) -> None:
        """Say where a worker hangs that does not get to its session; end it when it takes too long."""
        index, timing = member.index, self.state.config.timing
        if self.is_past(member.start_by_s):
            cause = no_session(timing.start_s)
            self.change(last_cause=f"{self.state.config.name(index)}: {cause}")
            quarantine.lost(self, index, cause)
            self.end_worker(index, cause)
        elif self.is_past(member.hint_at_s):
            self.update(index, hint_at_s=None)
            label = self.state.config.label(index)
            detail = f"{no_session(timing.session_hint_s)}; its output is in logs/worker-{label}.log"
            self.write_worker(index, "overdue", member.worker_pid, detail)

    def may_start(self, member: Member) -> bool:
        """Whether a host without a worker is to get one, now or later."""
        return member.start_at_step is not None and member.starts < self.state.config.max_starts

    # ---- losses --------------------------------------------------------------------------------------------

    def patience_s(self, member: Member) -> float:
        """How long this host's agent may be away before it counts as lost, and its slice with it.

        Where the workers out of reach could make steps without anybody else (all of the one slice there is),
        their lease is waited out: two groups must never both go on. So is everybody's when nobody of the
        world can be reached: it is the coordinator that is cut off, and they train on.
        """
        timing, state = self.state.config.timing, self.state
        is_alone = member.index in state.world and len(state.world_slices) == 1
        if (
            is_alone
            and not state.rehearsing
            and self.is_world_away()
            and member.worker is WorkerState.IN_WORLD
        ):
            return timing.lease_s
        if self.state.phase is Phase.RUNNING and self.is_world_away():
            return timing.lease_s
        is_patient = self.state.reconvening or self.state.phase in (Phase.RUNNING, Phase.REPLAYING)
        return timing.agent_grace_s if is_patient else 0.0

    def is_world_away(self) -> bool:
        """Whether no host of the world can be reached."""
        return not any(self.state.member(index).attached for index in self.state.world)

    def is_gone(self, member: Member) -> bool:
        """Whether a host's agent is away for longer than the phase allows."""
        if member.attached:
            return False
        return member.gone_since_s is None or self.is_past(member.gone_since_s + self.patience_s(member))

    def is_reconvening(self) -> bool:
        """Whether hosts that this coordinator's predecessor had may still come; then nothing is decided."""
        return self.state.reconvening and any(
            member.gone_since_s is not None and not self.is_gone(member) for member in self.state.members
        )

    def lost_members(self) -> tuple[int, ...]:
        """The members of the world (forming or running) that cannot be part of it any more.

        Those out of reach are written down and their restart planned.
        """
        forming = self.state.phase in (Phase.PLANNING, Phase.RESTORING)
        present = {WorkerState.READY, WorkerState.IN_WORLD} if forming else {WorkerState.IN_WORLD}
        lost = []
        for index in self.state.world:
            if self.is_gone(self.state.member(index)):
                self.count_as_lost(index)
            if self.state.member(index).worker not in present:
                lost.append(index)
        return tuple(lost)

    def count_as_lost(self, index: int) -> None:
        """A host out of reach has no worker any more, as far as this job is concerned."""
        member = self.state.member(index)
        if member.worker in (WorkerState.IN_WORLD, WorkerState.READY) and index in self.state.world:
            cause = "its host is out of reach (agent or host lost)"
            self.change(last_cause=f"{self.state.config.name(index)}: {cause}")
            self.write_loss(index, cause, "agent-heartbeat", member.last_life_unix_s)
        if member.worker is not WorkerState.NONE:
            quarantine.lost(self, index, "its host was out of reach")
            self.update(index, gone_since_s=None, snapshots=(), fenced=False)
            self.plan_restart(index)
