"""What outlives a coordinator: the machine restored from it, at any event, decides as the one before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from model_job import TIMING, UNIX_S, Job
from test_machine_simulation import build_job

from elastic.events import (
    AgentAttached,
    Event,
    Fence,
    Phase,
    ServiceLost,
    StartWorker,
    Tick,
    WorkerState,
    Write,
)
from elastic.machine import step
from elastic.moves_resume import resume, trains
from elastic.records import PhaseEntered, WorldFormed
from elastic.saved_state import SavedState, durable_part, restore, save
from elastic.state import Config, JobState, initial_state
from elastic.turn import Clock

SKEW_S = 1234.5
"""The clocks of two coordinators have nothing in common."""


def again(state: JobState, now_s: float) -> JobState:
    """The state after its coordinator died and another one came at once, on another clock."""
    body = msgspec.msgpack.encode(save(state, now_s))
    found = tuple(sorted(state.persisted, key=lambda one: -one.step))
    return restore(msgspec.msgpack.decode(body, type=SavedState), state.config, now_s + SKEW_S, found)


def attach_all(state: JobState, before: JobState, clock: Clock) -> tuple[JobState, list[Any]]:
    """Every agent that was attached comes with what it has: nothing has changed meanwhile."""
    commands: list[Any] = []
    for member in before.members:
        if member.attached:
            event = AgentAttached(
                member=member.index,
                worker=member.worker,
                worker_pid=member.worker_pid,
                generation=before.generation,
                data_address="",
                agent_pid=member.agent_pid,
            )
            state, more = step(state, event, clock)
            commands += more
    return state, commands


@pytest.mark.parametrize("seed", range(2000, 2030))
def test_machine_restored_at_any_event_goes_on_or_fences_and_says_nothing_else(seed: int) -> None:
    job = build_job(seed)
    draw = random.Random(seed)
    tell = job.tell

    def probe(event: Event) -> None:
        tell(event)
        if draw.random() < 0.1:
            check_restored(job)

    job.tell = probe  # type: ignore[method-assign]
    job.run(until_s=30.0)


def check_restored(job: Job) -> None:
    before, now_s = job.state, job.now_s
    restored = again(before, now_s)
    clock = Clock(mono_s=now_s + SKEW_S, unix_s=UNIX_S)
    state, commands = resume(restored, clock)
    if before.phase in (Phase.COMPLETED, Phase.FAILED, Phase.WAITING) or trains(restored):
        assert commands == ()
        assert (state.phase, state.generation) == (before.phase, before.generation)
    else:
        assert (state.phase, state.generation) == (Phase.FENCING, before.generation + 1)
    assert durable_part(restored).restored_steps == before.restored_steps
    if before.phase is not Phase.RUNNING or before.joining:
        return
    # A world that trains: with its agents back it decides as the machine that never died.
    state, commands = attach_all(state, before, clock)
    assert not [c for c in commands if isinstance(c, Fence | WorldFormed)]
    if any(member.finished for member in before.members):
        return  # told again by the agents, which this test does not model
    mine, mine_said = step(before, Tick(), Clock(mono_s=now_s, unix_s=UNIX_S))
    theirs, theirs_said = step(state, Tick(), clock)
    if not any(isinstance(c, StartWorker) for c in commands):  # one that was due is started on attaching
        assert deeds(theirs_said) == deeds(mine_said)
    assert (theirs.phase, theirs.generation, theirs.world) == (mine.phase, mine.generation, mine.world)


def deeds(commands: tuple[Any, ...]) -> list[str]:
    """What is done; a worker that attached and one that was known are started alike."""
    kinds = [type(c.record if isinstance(c, Write) else c).__name__ for c in commands]
    return [kind for kind in kinds if kind not in ("CopiesCompared", "TakeStacks")]


def test_moments_are_kept_as_seconds_from_now_and_the_time_between_does_not_count() -> None:
    state = initial_state(Config(num_slices=2, timing=TIMING), 10.0)
    state = state.with_member(1, quarantined_until_s=17.0, joined_s=4.0)
    restored = again(state, 12.0)
    assert restored.deadline_s == state.deadline_s is not None or restored.deadline_s is not None
    assert restored.deadline_s == pytest.approx(10.0 + TIMING.start_s + SKEW_S)
    assert restored.member(1).quarantined_until_s == pytest.approx(17.0 + SKEW_S)
    assert restored.member(1).joined_s == pytest.approx(4.0 + SKEW_S)


def test_commits_alone_need_no_new_entry_and_a_new_generation_does() -> None:
    state = initial_state(Config(num_slices=2, timing=TIMING), 0.0)
    assert durable_part(replace(state, newest_committed=7)) == durable_part(state)
    assert durable_part(replace(state, generation=1)) != durable_part(state)
    assert durable_part(replace(state, phase=Phase.RUNNING)) != durable_part(state)


def running(num_slices: int = 2) -> Job:
    job = Job(num_slices)
    job.when_phase(Phase.RUNNING, lambda: job.crash_coordinator(0.5))
    return job


def test_world_whose_coordinator_died_makes_no_step_twice_and_no_new_generation() -> None:
    job = running().run()
    job.assert_completed()
    assert job.num_crashes == 1
    assert len(job.formed) == 1


def test_worker_that_died_meanwhile_is_noticed_when_its_agent_comes_back() -> None:
    job = Job(3, rejoin_after_steps=None)
    job.when_phase(Phase.RUNNING, lambda: job.crash_coordinator(0.5))
    job.when(lambda job: job.is_down, lambda: None)
    job.when_phase(Phase.RUNNING, lambda: job.after(0.2, lambda: job.kill_worker(1)))
    job.run()
    job.assert_completed()
    assert [world.slices for world in job.formed] == [(0, 1, 2), (0, 2)]


def test_outage_longer_than_the_lease_ends_workers_and_training_goes_on_from_memory() -> None:
    job = Job(2)
    job.when_step(5, lambda: job.crash_coordinator(TIMING.lease_s + 2.0))
    job.run()
    job.assert_completed()
    assert len(job.formed) > 1
    assert job.formed[1].restored_step is not None
    assert job.formed[1].restored_step >= 5


@pytest.mark.parametrize("phase", [Phase.FENCING, Phase.RESTORING, Phase.REBUILDING])
def test_recovery_that_was_under_way_is_done_in_a_new_generation(phase: Phase) -> None:
    job = Job(3, rejoin_after_steps=None)
    job.when_step(5, lambda: job.kill_worker(2))
    job.when_phase(phase, lambda: job.crash_coordinator(0.2), generation=2)
    job.run()
    job.assert_completed()
    whys = [record.why for record in job.records(PhaseEntered)]
    assert any(why.startswith("another coordinator takes over from") for why in whys)
    assert job.formed[-1].slices == (0, 1)


def test_host_of_a_later_generation_than_the_job_knows_makes_a_later_one_still() -> None:
    state = initial_state(Config(num_slices=2, timing=TIMING), 0.0)
    event = AgentAttached(
        member=0, worker=WorkerState.NONE, worker_pid=0, generation=9, data_address="", agent_pid=5
    )
    state, commands = step(state, event, Clock(mono_s=1.0, unix_s=1.0))
    assert state.generation == 10
    assert Fence(member=0, generation=10) in commands


def test_worker_that_got_ready_while_nobody_listened_is_not_started_again() -> None:
    clock = Clock(mono_s=1.0, unix_s=1.0)
    state = initial_state(Config(num_slices=2, timing=TIMING), 0.0)
    attach = AgentAttached(
        member=0, worker=WorkerState.NONE, worker_pid=0, generation=0, data_address="", agent_pid=5
    )
    state, commands = step(state, attach, clock)
    assert StartWorker(member=0) in commands
    state, _ = resume(again(state, 1.0), clock)
    state, commands = step(state, replace(attach, worker=WorkerState.READY, worker_pid=77), clock)
    assert state.member(0).worker is WorkerState.READY
    assert not [c for c in commands if not isinstance(c, Write)]


def test_lost_runtime_service_of_the_running_world_costs_a_generation_and_no_slice() -> None:
    job = Job(3)
    job.when_step(5, lambda: job.tell(ServiceLost(generation=job.state.generation, cause="died")))
    job.run()
    job.assert_completed()
    assert [world.slices for world in job.formed] == [(0, 1, 2), (0, 1, 2)]
    assert job.losses == []


def test_lost_runtime_service_of_an_older_generation_changes_nothing() -> None:
    job = Job(3)
    job.when_step(5, lambda: job.tell(ServiceLost(generation=job.state.generation - 1, cause="died")))
    job.run()
    job.assert_completed()
    assert len(job.formed) == 1


def test_runtime_service_that_keeps_dying_ends_the_job_with_its_cause() -> None:
    job = Job(2)

    def lose() -> None:
        generation = job.state.generation
        job.tell(ServiceLost(generation=generation, cause="died"))
        job.when_phase(Phase.REBUILDING, lose, generation=generation + 1)

    job.when_phase(Phase.REBUILDING, lose)
    job.run()
    outcome, error = job.outcome
    assert outcome == "failed"
    assert "the runtime service of generation" in error
