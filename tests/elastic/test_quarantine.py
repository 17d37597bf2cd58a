"""A slice that is lost again and again is kept away longer each time; one that stays healthy is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_job import Job

from elastic.events import StartWorker
from elastic.history_text import describe, describe_quarantine
from elastic.quarantine import Flapping, remaining_s
from elastic.records import LossDetected, SliceQuarantined, WorkerEvent
from reshard.errors import UsageError

BOUNDS = Flapping(base_s=2.0, max_s=300.0, healthy_s=30.0)
MANY_STEPS = 4000


def flap(num_losses: int, *, after_s: float = 0.5, bounds: Flapping = BOUNDS) -> Job:
    """A job of three slices; slice 1 is killed so many times, each time `after_s` after it has joined."""
    job = Job(3, num_steps=MANY_STEPS, rejoin_after_steps=0, flapping=bounds)

    def kill_and_wait(left: int) -> None:
        job.kill_worker(1)
        if left:
            seen = len(job.formed)
            job.when(
                lambda job: (
                    any(1 in world.slices for world in job.formed[seen:])
                    and job.state.member(1).joined_s is not None
                ),
                lambda: job.after(after_s, lambda: kill_and_wait(left - 1)),
            )

    job.when_step(5, lambda: kill_and_wait(num_losses - 1))
    return job


def starts_after_losses(job: Job) -> list[float]:
    """How long after each loss of slice 1 its next worker was started, in seconds."""
    losses = [record.unix_s for record in job.records(LossDetected) if record.slice_index == 1]
    started = [
        record.unix_s
        for record in job.records(WorkerEvent)
        if record.slice_index == 1 and record.state == "started"
    ]
    return [next(moment for moment in started if moment >= loss) - loss for loss in losses]


def test_delays_double_from_the_second_loss_on_up_to_the_bound() -> None:
    assert [BOUNDS.delay_s(number) for number in range(7)] == [0, 0, 2, 4, 8, 16, 32]
    assert BOUNDS.delay_s(10) == BOUNDS.delay_s(10_000) == 300.0
    assert Flapping(base_s=0).delay_s(9) == 0.0


@given(st.integers(0, 300), st.floats(0, 100), st.floats(100, 1e6))
def test_delays_never_shrink_and_keep_the_bound(number: int, base_s: float, max_s: float) -> None:
    bounds = Flapping(base_s=base_s, max_s=max_s)
    assert 0 <= bounds.delay_s(number) <= bounds.delay_s(number + 1) <= max_s


@pytest.mark.parametrize("wrong", [{"base_s": -1.0}, {"base_s": 400.0}, {"healthy_s": 0.0}])
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Flapping(**wrong)


def test_slice_that_flaps_comes_back_later_each_time_while_the_others_go_on() -> None:
    job = flap(5)
    job.run(until_s=110.0)
    waits = starts_after_losses(job)
    assert len(waits) == 5
    for wait_s, wanted_s in zip(waits, [0.0, 2.0, 4.0, 8.0, 16.0], strict=True):
        assert wanted_s <= wait_s < wanted_s + 1.5
    records = job.records(SliceQuarantined)
    assert [(record.losses_in_row, record.delay_s) for record in records] == [(2, 2), (3, 4), (4, 8), (5, 16)]
    assert all(0 < record.healthy_s < 5 for record in records)
    assert not job.is_over
    assert job.state.world == (0, 1, 2)
    assert not any(phase == "WAITING" for phase in job.phases[1:])


def test_slice_that_stayed_healthy_starts_anew() -> None:
    bounds = Flapping(base_s=5.0, max_s=300.0, healthy_s=3.0)
    job = flap(4, after_s=4.0, bounds=bounds)
    job.run(until_s=60.0)
    assert len(starts_after_losses(job)) == 4
    assert max(starts_after_losses(job)) < 1.5
    assert job.records(SliceQuarantined) == []


def test_base_of_nothing_keeps_nobody_away() -> None:
    job = flap(4, bounds=Flapping(base_s=0.0))
    job.run(until_s=30.0)
    assert max(starts_after_losses(job)) < 1.5
    assert job.records(SliceQuarantined) == []


def test_job_that_cannot_go_on_without_the_slice_does_not_wait_for_its_quarantine() -> None:
    bounds = Flapping(base_s=100.0, max_s=300.0, healthy_s=30.0)
    job = Job(2, num_steps=60, min_slices=2, rejoin_after_steps=0, flapping=bounds)
    for step in (5, 15, 25):
        job.when_step(step, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert [record.delay_s for record in job.records(SliceQuarantined)] == [100.0, 200.0]
    assert job.now_s < 100.0


def test_slice_that_never_comes_back_is_not_said_to_be_in_quarantine() -> None:
    job = Job(3, num_steps=30, rejoin_after_steps=None)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert job.records(SliceQuarantined) == []
    started = [c for c in job.sent if isinstance(c, StartWorker) and c.member == 1]
    assert len(started) == 1


def test_host_that_is_lost_counts_as_a_worker_that_is() -> None:
    job = Job(3, num_steps=MANY_STEPS, rejoin_after_steps=0, flapping=BOUNDS)

    def kill_again() -> None:
        job.when(lambda job: job.state.world == (0, 1, 2), lambda: job.kill_host(1, back_s=0.1))

    job.when_step(5, lambda: job.kill_host(1, back_s=0.1))
    job.when(lambda job: job.state.world == (0, 2), kill_again)
    job.run(until_s=20.0)
    assert [record.losses_in_row for record in job.records(SliceQuarantined)] == [2]


def test_quarantine_is_told_in_words() -> None:
    record = SliceQuarantined(
        unix_s=0.0, generation=3, slice_index=1, losses_in_row=3, healthy_s=0.5, delay_s=10.0, cause="killed"
    )
    told = (
        "slice 1 is in quarantine for 10.00 s: "
        "lost 3 times in a row, last 500 ms after it had joined (killed)"
    )
    assert describe(record) == describe_quarantine(record) == told
    assert (remaining_s(None, 5.0), remaining_s(7.0, 5.0), remaining_s(3.0, 5.0)) == (0.0, 2.0, 0.0)
