"""What the recovery state machine does when a world's runtime service is gone."""

import pytest
from model_job import Job

from elastic.events import EndWorker, Phase, ServiceLost, WorkerLost
from elastic.records import WorkerEvent


def lose_service(job: Job) -> None:
    job.tell(ServiceLost(generation=job.state.generation, cause="died"))


def test_workers_whose_runtime_service_is_gone_are_all_replaced_and_no_slice_is_lost() -> None:
    job = Job(3)
    job.when_step(7, lambda: lose_service(job))
    job.run()
    job.assert_completed()
    assert [(world.slices, world.mode, world.lost) for world in job.formed[1:]] == [
        ((0, 1, 2), "respawn", ())
    ]
    assert [host.num_workers for host in job.hosts] == [2, 2, 2]
    assert job.losses == []


def test_worker_that_the_runtime_ends_after_its_replacement_was_ordered_is_no_loss() -> None:
    job = Job(3)

    def strike() -> None:
        pids = [job.state.member(index).worker_pid for index in range(3)]
        lose_service(job)
        for index, pid in enumerate(pids):
            late = WorkerLost(
                member=index,
                pid=pid,
                cause="killed by SIGABRT",
                detector="process-exit",
                last_life_unix_s=0.0,
                aborted=True,
            )
            job.tell(late)

    job.when_step(7, strike)
    job.run()
    job.assert_completed()
    assert job.losses == []
    assert len(job.formed) == 2


def test_service_lost_while_a_world_rebuilds_replaces_who_had_entered_it() -> None:
    job = Job(3)
    job.when_phase(Phase.REBUILDING, lambda: lose_service(job))
    job.run()
    job.assert_completed()
    ended = {command.member for command in job.sent if isinstance(command, EndWorker)}
    assert ended == {0, 1, 2}
    assert job.losses == []


@pytest.mark.parametrize("seed", range(5))
def test_slice_killed_as_its_service_goes_down_comes_back_with_the_others(seed: int) -> None:
    job = Job(3, seed=seed)

    def strike() -> None:
        lose_service(job)
        job.kill_worker(1)

    job.when_step(7, strike)
    job.run()
    job.assert_completed()
    assert job.formed[-1].slices == (0, 1, 2)
    respawned = [event.slice_index for event in job.records(WorkerEvent) if event.state == "respawned"]
    assert sorted(respawned) == [0, 1, 2]
