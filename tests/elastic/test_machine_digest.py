"""That every restore a step was trained on is compared with what was captured, also when faults come in
between.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_job import Job

from elastic.events import DigestDone, Event, Phase, Write
from elastic.machine import step
from elastic.records import RestoreChecked
from elastic.state import JobState
from elastic.turn import Clock


def checked(job: Job) -> set[int]:
    return {check.generation for check in job.records(RestoreChecked)}


@pytest.mark.parametrize("seed", range(10))
def test_restore_is_compared_although_the_agent_that_computed_the_digest_died(seed: int) -> None:
    job = Job(3, seed=seed, rejoin_after_steps=None)
    job.digest_s = (0.02, 0.02)

    def strike() -> None:
        job.kill_worker(2)
        job.when_phase(Phase.REPLAYING, lambda: job.kill_agent(0, back_s=0.005), generation=2)

    job.when_step(7, strike)
    job.run()
    job.assert_completed()
    assert len(job.formed) == 2
    assert checked(job) == {job.formed[1].generation}


@pytest.mark.parametrize("seed", range(10))
def test_final_state_has_its_digest_although_the_agent_that_computed_it_died(seed: int) -> None:
    job = Job(3, seed=seed)
    job.when(lambda job: job.state.digesting, lambda: job.kill_agent(0, back_s=0.01))
    job.run()
    job.assert_completed()
    assert job.history[-1].state_digest


def left(phase: Phase) -> JobState:
    """A job that leaves a restored world whose state was not compared yet."""
    found: list[JobState] = []
    job = Job(3, rejoin_after_steps=None)
    job.when_step(7, lambda: job.kill_worker(2))
    job.when_step(12, lambda: job.kill_worker(1))
    job.when_phase(phase, lambda: found.append(job.state), generation=3)
    job.run()
    state = found[0]
    captured = (state.world_generation, 6, "d")
    return replace(state, captured_digest=captured, restored_digest=None, final_digest=None)


def after(state: JobState, event: Event) -> tuple[JobState, list[RestoreChecked]]:
    state, commands = step(state, event, Clock(mono_s=0.0, unix_s=0.0))
    records = [command.record for command in commands if isinstance(command, Write)]
    return state, [record for record in records if isinstance(record, RestoreChecked)]


@pytest.mark.parametrize("digest", ["d", "other"])
def test_digest_of_the_world_that_is_being_left_is_compared(digest: str) -> None:
    state = left(Phase.FENCING)
    told = DigestDone(member=0, generation=state.world_generation, step=6, purpose="restored", digest=digest)
    assert told.generation < state.generation
    _, checks = after(state, told)
    assert [(check.generation, check.restored_digest) for check in checks] == [(told.generation, digest)]


def test_digest_that_could_not_be_computed_is_no_comparison() -> None:
    state = left(Phase.FENCING)
    told = DigestDone(member=0, generation=state.world_generation, step=6, purpose="restored", digest="")
    assert after(state, told)[1] == []


def test_final_digest_of_the_world_that_is_being_left_does_not_count() -> None:
    state = left(Phase.FENCING)
    told = DigestDone(member=0, generation=state.world_generation, step=6, purpose="final", digest="d")
    assert after(state, told)[0].final_digest is None


def test_digest_of_a_world_before_the_present_one_is_refused() -> None:
    state = left(Phase.RESTORING)
    told = DigestDone(member=0, generation=state.world_generation - 1, step=6, purpose="restored", digest="d")
    assert after(state, told)[1] == []
