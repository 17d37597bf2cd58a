"""Who is left after a loss goes on in the runtime it is connected with, where that can be."""

import pytest
from model_job import Job

from elastic.events import Assign, Fence, Phase, StartService, StepFailed


def runtimes(job: Job) -> list[tuple[int, tuple[int, ...], int]]:
    """Of each world its generation, its slices, and the generation whose runtime it keeps (0: a new one)."""
    told = [command.world for command in job.sent if isinstance(command, Assign)]
    return [(world.generation, world.slices, world.runtime_generation) for world in told if not world.rank]


def services(job: Job) -> list[int]:
    return [command.generation for command in job.sent if isinstance(command, StartService)]


def flat_job(**settings: object) -> Job:
    settings.setdefault("rejoin_after_steps", None)
    return Job(**{"num_slices": 4, "keeps_runtime": True, **settings})  # type: ignore[arg-type]


def test_runtime_is_kept_loss_after_loss_and_no_service_is_started_for_it() -> None:
    job = flat_job()
    job.when_step(5, lambda: job.kill_worker(1))
    job.when_step(10, lambda: job.kill_worker(0))
    job.run()
    job.assert_completed()
    first, second, third = runtimes(job)
    assert (second[1:], third[1:]) == (((0, 2, 3), first[0]), ((2, 3), first[0]))
    assert services(job) == [first[0]]


def test_runtime_is_connected_anew_when_a_slice_comes_back_and_kept_again_after_that() -> None:
    job = flat_job(rejoin_after_steps=3, num_steps=40)
    job.when_step(5, lambda: job.kill_worker(1))
    job.when_step(25, lambda: job.kill_worker(2))
    job.run()
    job.assert_completed()
    kept = [(slices, bool(generation)) for _, slices, generation in runtimes(job)]
    assert kept[:4] == [((0, 1, 2, 3), False), ((0, 2, 3), True), ((0, 1, 2, 3), False), ((0, 1, 3), True)]


def test_runtime_is_not_kept_unless_the_adapter_can() -> None:
    job = flat_job(keeps_runtime=False)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert not any(kept for _, _, kept in runtimes(job))
    assert not any(command.keep_runtime for command in job.sent if isinstance(command, Fence))


def test_runtime_is_not_kept_by_a_world_whose_survivor_had_to_be_started_again() -> None:
    job = flat_job()

    def strike() -> None:
        worker = job.hosts[2].worker
        assert worker is not None
        worker.stuck = True
        job.kill_worker(1)

    job.when_step(5, strike)
    job.run()
    job.assert_completed()
    assert runtimes(job)[-1][2] == 0


@pytest.mark.parametrize("phase", [Phase.FENCING, Phase.RESTORING, Phase.REBUILDING, Phase.REPLAYING])
def test_second_loss_in_any_phase_ends_with_who_is_left(phase: Phase) -> None:
    job = flat_job()
    job.when_phase(phase, lambda: job.kill_worker(2), generation=2)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert runtimes(job)[-1][1] == (0, 3)


def test_first_step_that_fails_in_a_kept_runtime_has_it_connected_anew_at_once() -> None:
    job = flat_job()

    def fail() -> None:
        failed = StepFailed(member=0, generation=job.state.generation, error="INTERNAL: no")
        job.tell(failed)

    job.when_phase(Phase.REPLAYING, fail, generation=2)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    last = runtimes(job)[-1]
    assert last[1:] == ((0, 2, 3), 0)
    assert "SUSPECT" not in job.phases
