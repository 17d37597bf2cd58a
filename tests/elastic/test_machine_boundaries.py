"""Changes that cost no replay (joins, leaves), failures that are no losses, and the end of training."""

from dataclasses import replace

import pytest
from model_job import TIMING, Job

from elastic.events import Assign, Fence, LeftWorld, Phase, StartWorker, StopAfter, StopRequested
from elastic.records import RestoreChecked, RunEnded, WorkerEvent, WorldFormed


def worlds(job: Job) -> list[tuple[tuple[int, ...], str]]:
    return [(world.slices, world.mode) for world in job.formed]


def test_replacement_joins_at_a_step_boundary_without_replay() -> None:
    job = Job(3, num_steps=30)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert worlds(job) == [((0, 1, 2), "first"), ((0, 2), "in-place"), ((0, 1, 2), "scale-up")]
    grown = job.formed[-1]
    assert grown.restored_step == grown.newest_committed
    assert grown.joined == (1,)
    orders = [
        type(command)
        for command in job.sent
        if isinstance(command, StopAfter | Fence) and command.generation in (2, 3)
    ]
    assert orders == [Fence] * 3 + [StopAfter] * 2 + [Fence] * 3


def test_replacement_is_not_started_before_the_steps_it_has_to_wait() -> None:
    job = Job(3, num_steps=40, rejoin_after_steps=10)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert job.formed[-1].newest_committed > 15


def test_several_replacements_join_together_or_one_after_the_other() -> None:
    job = Job(4, num_steps=60)
    job.when_step(5, lambda: job.kill_workers(0, 3))
    job.run()
    job.assert_completed()
    assert worlds(job)[-1] == ((0, 1, 2, 3), "scale-up")
    assert all(world.restored_step == world.newest_committed for world in job.formed[2:])


def test_word_to_stop_that_one_misses_costs_seconds_not_the_whole_bound() -> None:
    job = Job(3, num_steps=40)
    job.when_step(5, lambda: job.kill_worker(1))

    def lose_the_word() -> None:
        # The agent dies with the word on its way, and its successor comes when the others have stopped.
        job.kill_agent(2, back_s=0.6)

    job.when(lambda job: job.state.joining, lose_the_word)
    job.run()
    job.assert_completed()
    assert worlds(job)[-1] == ((0, 1, 2), "scale-up")


def test_first_step_of_a_rehearsal_may_be_over_before_all_have_said_that_they_are_in() -> None:
    job = Job(2, rehearsals=1, min_slices=1)
    job.run()
    job.assert_completed()
    slow = Job(3, rehearsals=1, delay_s=(0.001, 0.4), seed=1).run()
    slow.assert_completed()


def test_preempted_slice_leaves_at_a_step_boundary_without_replay() -> None:
    job = Job(3, num_steps=30, rejoin_after_steps=None)
    job.when_step(5, lambda: job.hosts[1].preempt())
    job.run()
    job.assert_completed()
    assert worlds(job) == [((0, 1, 2), "first"), ((0, 2), "in-place")]
    assert job.formed[1].restored_step == job.formed[1].newest_committed
    assert job.losses == [(1, "preemption-notice")]


def test_preempted_slice_comes_back_when_it_may() -> None:
    job = Job(3, num_steps=40)
    job.when_step(5, lambda: job.hosts[0].preempt())
    job.run()
    job.assert_completed()
    assert worlds(job)[-1] == ((0, 1, 2), "scale-up")


# ---- failures that are no losses ---------------------------------------------------------------------------


def test_failed_step_without_a_loss_is_tried_once_more() -> None:
    job = Job(3)
    job.when_step(5, lambda: job.hosts[0].fail_step())
    job.run()
    job.assert_completed()
    assert worlds(job) == [((0, 1, 2), "first"), ((0, 1, 2), "in-place")]
    assert "SUSPECT" in job.phases


def test_step_that_fails_twice_on_healthy_slices_ends_the_job_with_its_error() -> None:
    job = Job(3)
    job.when_step(5, lambda: job.hosts[0].fail_step())
    job.when_phase(Phase.REPLAYING, lambda: job.hosts[1].fail_step(), generation=2)
    job.run()
    outcome, error = job.outcome
    assert outcome == "failed"
    assert "failed twice on healthy slices: slice " in error
    assert error.endswith("no such luck")


def test_user_failure_ends_the_job_at_once_with_its_error() -> None:
    job = Job(3)
    job.when_step(5, lambda: job.hosts[2].fail_by_user("ValueError: loss is NaN"))
    job.run()
    assert job.outcome[0] == "failed"
    assert "ValueError: loss is NaN" in job.outcome[1]
    assert len(job.formed) == 1
    assert all(host.worker is None for host in job.hosts)


def test_request_to_stop_ends_the_job_with_its_reason() -> None:
    job = Job(3)
    job.when_step(5, lambda: job.tell(StopRequested(reason="interrupted by Ctrl-C")))
    job.run()
    assert job.outcome == ("failed", "interrupted by Ctrl-C")


@pytest.mark.parametrize(("hosts", "next_step"), [((0,), 7), ((0, 1, 2), 6)])
def test_copies_that_turn_out_bad_mean_another_source_or_an_older_step(
    hosts: tuple[int, ...], next_step: int
) -> None:
    job = Job(3, rejoin_after_steps=None, delay_s=(0.001, 0.002))

    def spoil() -> None:
        for index in hosts:
            job.hosts[index].slots[:] = [slot for slot in job.hosts[index].slots if slot.step != 7]

    job.when_step(7, lambda: job.after(0.03, lambda: job.kill_worker(1)))
    job.when_phase(Phase.RESTORING, spoil)
    job.run()
    job.assert_completed()
    assert [world.restored_step for world in job.formed[1:]] == [7, next_step]


# ---- the end -----------------------------------------------------------------------------------------------


def test_end_of_training_writes_the_final_digest() -> None:
    job = Job(3).run()
    job.assert_completed()
    (ended,) = job.records(RunEnded)
    assert ended.final_step == 19
    assert ended.state_digest == str(hash(job.hosts[0].finished_content))
    assert all(host.is_released for host in job.hosts)


def test_every_restore_is_checked_by_digest() -> None:
    job = Job(3, num_steps=30)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    checks = job.records(RestoreChecked)
    assert {check.generation for check in checks} <= {2, 3}
    assert checks
    assert all(check.captured_digest == check.restored_digest for check in checks)


def test_loss_while_some_have_finished_goes_on_to_the_same_end() -> None:
    job = Job(3, delay_s=(0.001, 0.15), seed=2)
    job.when(
        lambda job: any(member.finished for member in job.state.members),
        lambda: job.kill_worker(next(m.index for m in job.state.members if not m.finished)),
    )
    job.run()
    job.assert_completed()


def test_word_of_a_finished_loop_survives_its_agent() -> None:
    job = Job(2, delay_s=(0.01, 0.01))
    job.when_step(18, lambda: job.after(0.25, lambda: job.kill_agent(1, back_s=0.5)))
    job.run()
    job.assert_completed()


def solo_of(job: Job) -> list[tuple[int, int]]:
    """Who played a world of how many slices alone."""
    assigned = [command for command in job.sent if isinstance(command, Assign)]
    return [(one.member, len(one.world.slices)) for one in assigned if one.world.solo]


def test_slice_that_is_left_out_of_a_rehearsal_plays_it_alone() -> None:
    for seed in range(8):
        job = Job(3, rehearsals=1, plays_alone=True, delay_s=(0.001, 0.4), seed=seed).run()
        job.assert_completed()
        assert solo_of(job) == [(2, 2)]
        rehearsal, first = job.records(WorldFormed)
        assert (rehearsal.slices, first.slices) == ((0, 1), (0, 1, 2))
    assert solo_of(Job(3, rehearsals=1).run()) == []


def test_slice_that_dies_while_it_rehearses_alone_is_back_later() -> None:
    job = Job(3, rehearsals=1, plays_alone=True, rejoin_after_steps=2)
    job.when(lambda job: bool(solo_of(job)), lambda: job.kill_worker(2))
    job.run()
    job.assert_completed()
    assert job.records(WorldFormed)[-1].slices == (0, 1, 2)


def test_worker_is_awaited_unless_others_train() -> None:
    job = Job(3, rejoin_after_steps=2)
    job.when_step(7, lambda: job.kill_worker(1))
    job.run()
    assert [c.is_awaited for c in job.sent if isinstance(c, StartWorker)] == [True, True, True, False]


def test_rehearsal_does_not_count_as_training() -> None:
    job = Job(3, rehearsals=1)
    job.when_phase(Phase.REPLAYING, lambda: None)
    job.run()
    rehearsal, first = job.records(WorldFormed)
    assert (rehearsal.mode, first.mode) == ("rehearsal", "first")
    assert first.newest_committed == -1
    assert first.joined == ()


def test_left_world_of_a_world_that_was_not_asked_changes_nothing() -> None:
    job = Job(2)
    job.when_step(5, lambda: job.tell(LeftWorld(member=0, generation=job.state.generation)))
    job.run()
    job.assert_completed()
    assert len(job.formed) == 1


# ---- a script that never gets to its session ---------------------------------------------------------------


def test_worker_that_does_not_get_to_its_session_is_named_while_the_job_waits_and_when_it_gives_up() -> None:
    job = Job(2, timing=replace(TIMING, session_hint_s=5.0))
    for host in job.hosts:
        host.never_ready = True
    job.run(until_s=60.0)
    told = [r for r in job.records(WorkerEvent) if r.state == "overdue"]
    assert [r.slice_index for r in told[:2]] == [0, 1]
    assert told[0].detail.startswith("the script has not called elastic.session() in 5 s; its output is in")
    outcome, error = job.outcome
    assert outcome == "failed"
    assert "the script has not called elastic.session() in 15 s" in error
