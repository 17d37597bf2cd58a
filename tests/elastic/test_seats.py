"""Spares: who takes whose place, and what the machine makes of it."""

from __future__ import annotations

import random
from functools import partial

import pytest
from model_job import Job
from model_state import layout_for

from elastic.events import Assign
from elastic.records import WorldFormed
from elastic.seats import filled, in_order, logical, seated, tell_changes
from reshard.errors import UsageError
from reshard.ids import HostId


def worlds(job: Job) -> list[tuple[tuple[int, ...], str]]:
    return [(world.slices, world.mode) for world in job.formed]


def test_spare_takes_the_seat_of_a_slice_that_is_not_able_and_no_other() -> None:
    assert filled((0, 1, 2), {0, 1, 2, 3}) == (0, 1, 2)
    assert filled((0, 1, 2), {0, 2, 3}) == (0, 3, 2)
    assert filled((0, 1, 2), {2, 3, 4}) == (3, 4, 2)
    assert filled((0, 1, 2), {2, 4}) == (4, 1, 2)
    assert seated((0, 1, 2), {2, 4}) == (4, 2)
    assert logical((0, 3, 2), (3, 2)) == (1, 2)
    assert tell_changes((0, 1, 2), (0, 3, 2)) == "slice 3, a spare, takes the place of slice 1"


def test_layout_for_seats_is_that_of_the_numbers_with_other_names() -> None:
    hosts = (HostId(0), HostId(3), HostId(2))
    assert in_order(layout_for((0, 2, 3)), hosts) == layout_for((0, 3, 2))
    assert in_order(layout_for((0, 2)), (HostId(0), HostId(2))) == layout_for((0, 2))


def test_spare_takes_over_at_once_and_no_step_is_made_with_fewer_slices() -> None:
    job = Job(3, spares=1, num_steps=30)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert worlds(job) == [((0, 1, 2), "first"), ((0, 3, 2), "in-place")]
    taken = job.formed[1]
    assert (taken.lost, taken.joined) == ((1,), (3,))
    assert "slice 3, a spare, takes the place of slice 1" in taken.explanation
    told = {c.world.seats for c in job.sent if isinstance(c, Assign) and c.world.slices == (0, 3, 2)}
    assert told == {(0, 1, 2)}


def test_returned_slice_is_the_next_spare() -> None:
    job = Job(3, spares=1, num_steps=60)
    job.when_step(5, lambda: job.kill_worker(1))
    job.when_step(25, lambda: job.kill_worker(0))
    job.when_step(45, lambda: job.kill_host(3, back_s=0.5))
    job.run()
    job.assert_completed()
    assert worlds(job) == [
        ((0, 1, 2), "first"),
        ((0, 3, 2), "in-place"),
        ((1, 3, 2), "in-place"),
        ((1, 0, 2), "in-place"),
    ]


def test_preempted_slice_leaves_its_seat_to_the_spare_without_replay() -> None:
    job = Job(3, spares=1, num_steps=30)
    job.when_step(5, lambda: job.hosts[1].preempt())
    job.run()
    job.assert_completed()
    assert worlds(job) == [((0, 1, 2), "first"), ((0, 3, 2), "in-place")]
    assert job.formed[1].restored_step == job.formed[1].newest_committed


def test_more_losses_than_spares_shrink_the_world_and_who_returns_fills_it() -> None:
    job = Job(3, spares=1, num_steps=60)
    job.when_step(5, lambda: job.kill_workers(0, 1))
    job.run()
    job.assert_completed()
    assert worlds(job)[1] == ((3, 2), "in-place")
    assert len(worlds(job)[-1][0]) == 3


def test_first_world_is_that_of_the_slices_not_of_the_spares() -> None:
    job = Job(2, spares=2, num_steps=20, late_s={0: 2.0})
    job.run()
    job.assert_completed()
    assert worlds(job) == [((0, 1), "first")]


def test_loss_of_a_spare_is_nobodys_concern() -> None:
    job = Job(2, spares=1, num_steps=30)
    job.when_step(5, lambda: job.kill_worker(2))
    job.when_step(12, lambda: job.kill_agent(2, back_s=0.3))
    job.run()
    job.assert_completed()
    assert worlds(job) == [((0, 1), "first")]
    assert job.losses == []


def test_job_with_fewer_than_no_spares_is_refused() -> None:
    with pytest.raises(UsageError, match="spares"):
        Job(2, spares=-1)


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_jobs_with_spares_keep_every_promise_under_random_faults(first: int) -> None:
    completed = 0
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        num_slices = draw.choice((1, 2, 3, 4))
        job = Job(
            num_slices,
            seed=seed,
            spares=draw.choice((1, 1, 2)),
            num_steps=draw.randint(10, 30),
            min_slices=draw.randint(1, num_slices),
            replicas=draw.choice((1, 2, num_slices)),
            rehearsals=draw.choice((0, 1)),
            max_starts=30,
            persist_every=draw.choice((None, 3)),
        )
        for _ in range(draw.choice((1, 2, 3))):
            host = job.hosts[draw.randrange(len(job.hosts))]
            back_s = draw.uniform(0.05, 2.0)
            strike = draw.choice(
                (
                    partial(host.kill_worker, "killed"),
                    partial(host.kill_worker, "killed"),
                    partial(host.kill_agent, back_s),
                    partial(host.kill_host, back_s),
                    host.preempt,
                )
            )
            job.after(draw.uniform(0.5, 5.0), strike)
        try:
            job.run(until_s=90.0)
            outcome, error = job.outcome
            if outcome == "completed":
                job.assert_completed()
                completed += 1
            else:
                assert "is lost" in error, error
            for world in job.records(WorldFormed):
                assert len(set(world.slices)) == len(world.slices) <= num_slices
        except Exception as failed:
            raise AssertionError(f"seed {seed} at {job.now_s:.3f} s: {failed}") from failed
    assert completed > 35
