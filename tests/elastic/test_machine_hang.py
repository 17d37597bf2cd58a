"""No step ends in time, and nobody has died: who has not arrived is ended, the others go on."""

from __future__ import annotations

from dataclasses import replace

from model_job import TIMING, Job

from elastic.detector_events import StepFailed, TakeStacks
from elastic.events import Phase
from elastic.records import LossDetected, WorkerEvent

HANG_S = TIMING.hang_after_s
assert HANG_S is not None


def hang(job: Job, *indexes: int) -> None:
    """These workers get into no further step, and do not leave their world."""
    for index in indexes:
        worker = job.hosts[index].worker
        assert worker is not None
        worker.hangs = worker.stuck = True


def overdue(job: Job) -> list[tuple[int, str]]:
    return [(e.slice_index, e.detail) for e in job.records(WorkerEvent) if e.state == "overdue"]


def test_slice_that_hangs_is_named_and_ended_and_comes_back() -> None:
    job = Job(3, num_steps=30)
    job.when_step(7, lambda: hang(job, 1))
    job.run()
    job.assert_completed()
    assert job.losses == [(1, "step-watchdog")]
    (loss,) = job.records(LossDetected)
    assert "in the script, f" in loss.cause
    assert "logs/worker-1.stacks" in loss.cause
    assert HANG_S <= loss.unix_s - loss.last_life_unix_s < HANG_S + 2.0
    assert [index for index, _ in overdue(job)] == [0, 1, 2]
    assert [world.slices for world in job.formed] == [(0, 1, 2), (0, 2), (0, 1, 2)]


def test_several_slices_that_hang_are_ended_together() -> None:
    job = Job(4, num_steps=30, replicas=4, rejoin_after_steps=None)
    job.when_step(7, lambda: hang(job, 0, 3))
    job.run()
    job.assert_completed()
    assert [loss[0] for loss in job.losses] == [0, 3]
    assert job.formed[-1].slices == (1, 2)


def test_worker_that_does_not_answer_is_the_one_that_hangs() -> None:
    job = Job(3, num_steps=30, rejoin_after_steps=None)

    def strike() -> None:
        hang(job, 2)
        job.hosts[2].is_deaf = True

    job.when_step(7, strike)
    job.run()
    job.assert_completed()
    assert job.losses == [(2, "step-watchdog")]
    assert "no answer" in job.records(LossDetected)[0].cause


def test_pause_that_all_slices_make_together_is_told_and_left_alone() -> None:
    job = Job(3, num_steps=30)
    job.when_step(7, lambda: hang(job, 0, 1, 2))
    job.run(until_s=100.0)
    assert job.state.phase is Phase.RUNNING
    assert len(job.formed) == 1
    assert [index for index, _ in overdue(job)] == [0, 1, 2] * 2  # after the bound, and after twice as much


def test_step_in_which_all_have_arrived_is_tried_once_more_and_then_ends_the_job() -> None:
    job = Job(3, num_steps=30)

    def lose_every_step() -> None:
        for host in job.hosts:
            assert host.worker is not None
            host.worker.hangs = host.worker.waits = True

    job.when_step(7, lose_every_step)
    job.run(until_s=2000.0)
    outcome, error = job.outcome
    assert outcome == "failed"
    assert "twice did not end within" in error
    assert "--hang-after-s" in error
    assert job.losses == []
    assert len(job.formed) == 2


def test_nobody_is_asked_where_the_watchdog_is_off() -> None:
    job = Job(3, num_steps=30, timing=replace(TIMING, hang_after_s=None))
    job.when_step(7, lambda: hang(job, 1))
    job.run(until_s=1000.0)
    assert not any(isinstance(command, TakeStacks) for command in job.sent)
    assert job.state.phase is Phase.RUNNING


def test_slice_whose_devices_are_sick_is_the_loss_that_explains_a_failed_step() -> None:
    job = Job(3, num_steps=30, rejoin_after_steps=None)

    def fail(devices: str | None) -> None:
        generation = job.state.generation
        job.tell(StepFailed(member=1, generation=generation, error="INTERNAL", devices=devices))

    job.when_step(7, lambda: fail(None))
    job.when_phase(Phase.SUSPECT, lambda: fail("device 3 did not answer"))
    job.run()
    job.assert_completed()
    assert job.losses == [(1, "device-probe")]
    assert job.formed[-1].slices == (0, 2)


def test_failed_step_waits_for_a_probe_that_is_under_way_but_not_for_ever() -> None:
    job = Job(3, num_steps=30)
    job.when_step(7, lambda: job.tell(StepFailed(member=1, generation=1, error="INTERNAL")))
    began_s: list[float] = []
    job.when_phase(Phase.SUSPECT, lambda: began_s.append(job.now_s))
    ended_s: list[float] = []
    job.when_phase(Phase.FENCING, lambda: ended_s.append(job.now_s), generation=2)
    job.run()
    job.assert_completed()
    waited_s = ended_s[0] - began_s[0]
    assert TIMING.suspect_s + TIMING.probe_s <= waited_s < TIMING.suspect_s + TIMING.probe_s + 0.3
