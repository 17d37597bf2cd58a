"""The persistent tier as the machine sees it: shares, failures, and going back to it when memory is lost."""

import pytest
from model_job import Job
from model_state import layout_for

from elastic.choose import choose_persisted
from elastic.events import Phase, SnapshotSummary
from elastic.records import PersistFailed, RunEnded, SnapshotPersisted

EARLIER = tuple((number, 7) for number in range(6))
"""The state that an earlier run of generation 7 left: steps 0 to 5."""


def test_due_snapshots_get_into_the_persistent_tier_once_all_shares_are_written() -> None:
    job = Job(3, num_steps=14, persist_every=4).run()
    job.assert_completed()
    assert [record.step for record in job.records(SnapshotPersisted)] == [3, 7, 11, 13]  # 13: the last
    assert job.records(PersistFailed) == []


def test_loss_of_all_hosts_goes_on_from_the_persistent_tier_and_names_the_steps() -> None:
    job = Job(3, num_steps=12, persist_every=4)
    job.when_step(6, lambda: job.kill_hosts(0, 1, 2, back_s=0.5))
    job.run().assert_completed()
    again = job.formed[1]
    assert again.restored_step == 3
    assert again.newest_committed >= 6
    assert "step 3 is in the persistent tier; steps 4 to" in again.explanation
    assert "were lost from memory" in again.explanation


def test_hosts_that_stay_away_are_waited_for_before_the_persistent_tier_is_used() -> None:
    job = Job(3, num_steps=12, persist_every=4, min_slices=1)
    job.when_step(6, lambda: (job.kill_hosts(0, 1, back_s=None), job.kill_host(2, back_s=0.5)))
    job.run().assert_completed()
    assert job.formed[1].slices == (2,)
    assert job.formed[1].restored_step == 3


def test_loss_of_all_hosts_before_the_first_persisted_snapshot_loses_the_state() -> None:
    job = Job(2, num_steps=12, persist_every=8)
    job.when_step(4, lambda: job.kill_hosts(0, 1, back_s=0.5))
    outcome, error = job.run().outcome
    assert outcome == "failed"
    assert "the state is lost, and 5 committed steps with it" in error


def test_full_disk_is_said_once_a_snapshot_and_training_goes_on() -> None:
    job = Job(3, num_steps=12, persist_every=4)
    job.disk_works = False
    job.run().assert_completed()
    failures = job.records(PersistFailed)
    assert [(failure.step, failure.reason) for failure in failures] == [
        (3, "the disk is full"),
        (7, "the disk is full"),
        (11, "the disk is full"),
    ]
    assert job.records(SnapshotPersisted) == []


def test_slow_tier_leaves_steps_out_but_what_was_begun_gets_there() -> None:
    job = Job(3, num_steps=30, persist_every=1)
    job.share_s = (0.1, 0.5)  # of steps of 0.1 s
    job.run().assert_completed()
    written = [record.step for record in job.records(SnapshotPersisted)]
    left_out = [failure.step for failure in job.records(PersistFailed)]
    assert len(written) >= 4
    assert all("was still being written" in failure.reason for failure in job.records(PersistFailed))
    assert sorted([*written, *left_out]) == list(range(30))


def test_agent_that_is_started_again_while_it_writes_ends_that_snapshot_and_not_the_next() -> None:
    job = Job(3, num_steps=24, persist_every=4)
    job.share_s = (0.2, 0.25)
    job.when(lambda j: bool(j.state.persisting), lambda: job.kill_agent(1, back_s=0.1))
    job.run().assert_completed()
    begun = [one for one in job.records(PersistFailed) if "still being written" not in one.reason]
    assert ["the agent of slice 1 was started again" in failure.reason for failure in begun] == [True]
    assert len(job.records(SnapshotPersisted)) >= 3


def test_step_that_is_trained_again_is_persisted_though_it_was_given_up_before() -> None:
    job = Job(3, num_steps=16, persist_every=4)
    job.share_s = (0.15, 0.2)
    job.when(
        lambda j: any(one.step == 7 for one in j.state.persisting),
        lambda: job.kill_hosts(0, 1, 2, back_s=0.5),
    )
    job.run().assert_completed()
    assert [failure.step for failure in job.records(PersistFailed)] == [7]
    assert [record.step for record in job.records(SnapshotPersisted)] == [3, 7, 11, 15]


def test_agent_that_is_started_again_while_it_finishes_ends_that_snapshot() -> None:
    job = Job(3, num_steps=24, persist_every=4)
    job.finish_s = 0.3
    job.when(lambda j: j.state.is_finishing_persist, lambda: job.kill_agent(0, back_s=0.1))
    job.run().assert_completed()
    begun = [one for one in job.records(PersistFailed) if "still being written" not in one.reason]
    assert ["the agent of slice 0 was started again" in failure.reason for failure in begun] == [True]
    assert len(job.records(SnapshotPersisted)) >= 3


def test_share_that_never_comes_is_not_waited_for_without_a_bound() -> None:
    job = Job(3, num_steps=90, persist_every=4)
    job.stuck_hosts = {1}
    job.when_step(9, job.stuck_hosts.clear)
    job.run().assert_completed()
    assert "not all hosts have written it in time" in [one.reason for one in job.records(PersistFailed)]
    assert job.records(SnapshotPersisted)


def test_loss_while_shares_are_written_abandons_that_snapshot_and_says_so() -> None:
    job = Job(3, num_steps=12, persist_every=4, seed=3)
    job.share_s = (0.2, 0.3)
    job.when(lambda j: bool(j.state.persisting), lambda: job.kill_worker(1))
    job.run().assert_completed()
    failures = job.records(PersistFailed)
    assert [failure.reason for failure in failures] == ["the world changed while its hosts wrote it"]


@pytest.mark.parametrize("num_slices", [2, 4])
def test_new_job_goes_on_from_what_an_earlier_one_left(num_slices: int) -> None:
    job = Job(num_slices, num_steps=12, disk={5: (7, EARLIER)}, rehearsals=1)
    job.run().assert_completed()
    assert job.formed[0].restored_step == 5
    assert job.formed[0].mode == "first"
    assert job.records(RunEnded)[0].final_step == 11


def test_snapshot_that_cannot_be_read_back_gives_way_to_an_older_one() -> None:
    job = Job(2, num_steps=12, disk={5: (7, EARLIER), 3: (7, EARLIER[:4])})
    job.unreadable.add(5)
    job.run().assert_completed()
    assert [world.restored_step for world in job.formed] == [5, 3]
    assert [failure.step for failure in job.records(PersistFailed)] == [5]


def test_snapshot_that_was_refused_once_is_not_chosen_again() -> None:
    job = Job(2, num_steps=12, disk={5: (7, EARLIER), 3: (7, EARLIER[:4])})
    job.unreadable.add(5)
    job.when(
        lambda j: len(j.formed) == 2 and j.state.phase is Phase.RUNNING,
        lambda: (job.unreadable.clear(), job.kill_hosts(0, 1, back_s=0.5)),
    )
    job.run().assert_completed()
    assert [world.restored_step for world in job.formed] == [5, 3, 3]


def test_persisted_snapshot_of_an_abandoned_way_is_not_chosen() -> None:
    layout = layout_for((0, 1))
    persisted = [
        SnapshotSummary(step=step, generation=generation, layout=layout, holdings=())
        for step, generation in ((9, 1), (5, 1), (7, 3))
    ]
    went_back = {1: -1, 2: 6, 3: 6}
    choice = choose_persisted(persisted, went_back)
    assert choice is not None
    assert (choice.step, choice.generation) == (7, 3)
    went_back_again = {**went_back, 4: 5}
    choice = choose_persisted(persisted, went_back_again)
    assert choice is not None
    assert (choice.step, choice.generation) == (5, 1)
    assert choose_persisted(persisted, {**went_back_again, 5: 2}) is None
