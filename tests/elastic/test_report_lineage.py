"""Steps and samples: lost, repeated, replayed."""

from dataclasses import replace

import histories
import pytest
from histories import BATCH, EPOCH, History, ids_at, with_ids
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic.history_lineage import Execution, trace_lineage
from elastic.history_samples import count_repeated_ids
from elastic.report import build_report
from elastic.report_schema import SampleCounts, StepCounts

PROPERTY = settings(max_examples=settings().max_examples * 3)


def counts(history):
    report = build_report(history.records)
    return report.steps, report.samples, report


def test_report_counts_every_step_and_sample_once_when_undisturbed():
    steps, samples, report = counts(histories.undisturbed())
    assert steps == StepCounts(target=20, committed=20, lost=0, repeated=0, replayed=0)
    assert samples == SampleCounts(consumed=20 * BATCH, lost=0, repeated=0)
    assert set(report.invariants.values()) == {"held"}


def test_report_counts_two_replayed_steps_as_neither_lost_nor_repeated():
    steps, samples, report = counts(histories.killed_and_replayed())
    assert steps == StepCounts(target=20, committed=20, lost=0, repeated=0, replayed=2)
    assert samples == SampleCounts(consumed=20 * BATCH, lost=0, repeated=0)
    assert report.recoveries[0].replayed_steps == 2
    assert report.broken == ()


def test_report_counts_a_step_that_is_neither_restored_nor_replayed_as_lost():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 8, slices=(0, 2)).steps(10, 20).end()
    steps, samples, report = counts(history)
    assert (steps.lost, steps.committed, samples.lost) == (1, 19, BATCH)
    assert set(report.broken) == {"no_step_lost", "no_sample_lost"}


def test_report_counts_a_step_rolled_back_at_the_end_as_lost():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 8, slices=(0, 2)).steps(9, 9).end()
    steps, samples, _ = counts(history)
    assert (steps.committed, steps.lost, steps.replayed) == (9, 1, 1)
    assert samples.lost == BATCH


def test_report_counts_a_step_applied_to_a_state_that_has_it_as_repeated():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 10, slices=(0, 2)).steps(10, 20).end()
    steps, samples, report = counts(history)
    assert (steps.repeated, steps.lost, samples.repeated, samples.consumed) == (1, 0, BATCH, 21 * BATCH)
    assert set(report.broken) == {"no_step_repeated", "no_sample_repeated"}


def test_report_counts_a_step_that_one_slice_commits_twice_as_repeated():
    history = History().first().steps(1, 5).steps(5, 5).end()
    assert counts(history)[0].repeated == 1


def test_report_takes_the_same_record_twice_for_a_message_sent_again():
    history = History().first().steps(1, 5)
    history.add(history.records[-1])
    steps, samples, report = counts(history.end())
    assert (steps.repeated, samples.repeated, report.broken) == (0, 0, ())


def test_report_forgets_a_repeated_step_that_was_rolled_back():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 10, slices=(0, 2)).steps(10, 11).lose(0)
    history.recover("in-place", 9, slices=(2,)).steps(10, 20).end()
    steps, samples, report = counts(history)
    assert (steps.committed, steps.repeated, samples.repeated, report.broken) == (20, 0, 0, ())


def test_report_counts_a_step_run_again_with_other_samples_as_lost_with_what_it_missed():
    other = (*ids_at(8 * BATCH)[:-1], 1_000)
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 8, slices=(0, 2)).steps(9, 20, change=with_ids(9, other)).end()
    steps, samples, report = counts(history)
    assert (steps.lost, steps.replayed, samples.lost) == (1, 1, 1)
    assert {"no_step_lost", "no_sample_lost"} <= set(report.broken)


def test_report_does_not_count_a_replay_in_another_order_as_lost():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 8, slices=(0, 2))
    history.steps(9, 20, change=with_ids(9, ids_at(8 * BATCH)[::-1])).end()
    steps, samples, _ = counts(history)
    assert (steps.lost, steps.replayed, samples.lost) == (0, 2, 0)


def test_report_counts_an_id_that_recurs_within_an_epoch_as_repeated_and_its_place_as_filled():
    wrong = (*ids_at(4 * BATCH)[:-1], ids_at(0)[0])
    history = History().first().steps(1, 20, change=with_ids(5, wrong)).end()
    _, samples, report = counts(history)
    assert samples.repeated == 1
    assert report.broken == ("no_sample_repeated",)


def test_report_counts_overlapping_places_as_repeated_and_gaps_as_lost():
    def shift(commit):
        return replace(commit, position=commit.position + (1 if commit.step == 3 else 0))

    _, samples, _ = counts(History().first().steps(1, 20, change=shift).end())
    assert (samples.lost, samples.repeated) == (1, 1)


def test_report_counts_a_fresh_stream_that_begins_late_as_lost():
    def later(commit):
        return replace(commit, position=commit.position + 8, sample_ids=ids_at(commit.position + 8))

    assert counts(History().first().steps(1, 5, change=later).end())[1].lost == 8


def test_report_sees_journals_of_two_slices_disagree():
    wrong = with_ids(5, ids_at(4 * BATCH)[::-1], only_slice=2)
    report = build_report(History().first().steps(1, 20, change=wrong).end().records)
    assert report.broken == ("journals_agree",)


@pytest.mark.parametrize("slices", [(0,), (0, 1, 2)], ids=["of one slice", "of all"])
def test_report_says_unknown_and_not_broken_where_journal_entries_were_not_read_in_time(slices):
    def late(commit):
        is_late = commit.step == 5 and commit.slice_index in slices
        return replace(commit, position=0, sample_ids=()) if is_late else commit

    report = build_report(History().first().steps(1, 20, change=late).end().records)
    assert report.broken == ()
    assert report.invariants["journals_agree"] == "unknown"
    assert (report.samples.lost, report.samples.repeated) == (0, 0)
    assert report.invariants["no_sample_lost"] == ("held" if slices == (0,) else "unknown")


def test_report_sees_an_old_generation_go_on():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 10, slices=(0, 2)).steps(11, 12)
    history.steps(11, 11, by=(1,), generation=1).steps(13, 20).end()
    steps, samples, report = counts(history)
    assert report.broken == ("one_group_at_a_time",)
    assert (steps.committed, steps.lost, samples.repeated) == (20, 0, 0)


def test_report_ignores_what_a_rehearsal_commits():
    history = History().formed("rehearsal", None, slices=(0, 1, 2), check=False).steps(1, 3)
    history.newest = 0
    steps, samples, report = counts(history.first().steps(1, 20).end())
    assert (steps.committed, steps.repeated, samples.consumed) == (20, 0, 20 * BATCH)
    assert report.recoveries == ()


def test_report_does_not_call_a_restored_step_lost_whose_commit_was_never_heard():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 11, slices=(0, 2)).steps(12, 20).end()
    steps, samples, report = counts(history)
    assert (steps.committed, steps.lost, samples.lost) == (20, 0, 0)
    assert report.invariants["no_step_lost"] == "held"
    assert report.invariants["no_sample_lost"] == report.invariants["no_sample_repeated"] == "unknown"


def test_report_takes_up_again_what_a_newer_snapshot_of_an_older_world_holds():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 8, slices=(0, 2)).lose(0)
    history.recover("respawn", 10, slices=(2,)).steps(11, 20).end()
    steps, _, report = counts(history)
    assert (steps.committed, steps.lost, steps.replayed, report.broken) == (20, 0, 0, ())


def test_report_of_a_run_that_goes_on_from_an_earlier_one_begins_after_its_snapshot():
    steps, samples, report = counts(History().first(restored=5).steps(6, 20).end())
    assert (steps.committed, steps.lost, samples.lost) == (15, 0, 0)
    assert report.invariants["no_sample_repeated"] == "unknown"
    assert counts(History().first(restored=5).steps(7, 20).end())[0].lost == 1


def test_report_of_a_failed_run_counts_what_no_snapshot_holds_as_lost():
    history = History().first().steps(1, 10).lose(1).phase("FENCING").phase("FAILED", 0.1)
    history.end("failed", error="no copy of a shard is left", digest="", restorable=-1)
    steps, samples, report = counts(history)
    assert (steps.committed, steps.lost, samples.consumed, samples.lost) == (0, 10, 0, 10 * BATCH)
    assert report.invariants["no_step_lost"] == "broken"
    assert (report.run.outcome, report.run.error) == ("failed", "no copy of a shard is left")


def test_report_of_a_failed_run_counts_what_is_newer_than_the_snapshot_left_as_lost():
    history = History().first().steps(1, 10).lose(1).phase("FENCING").phase("FAILED", 0.1)
    steps, samples, _ = counts(history.end("failed", error="gone", digest="", restorable=8))
    assert (steps.committed, steps.lost, samples.lost) == (8, 2, 2 * BATCH)


def test_report_of_a_failed_run_leaves_unknown_what_nobody_looked_at_after_a_loss():
    history = History().first().steps(1, 10).lose(1).phase("FENCING").phase("WAITING", 0.1)
    steps, _, report = counts(history.end("failed", error="below the minimum", digest=""))
    assert (steps.committed, steps.lost) == (10, 0)
    assert report.invariants["no_step_lost"] == report.invariants["no_sample_lost"] == "unknown"


def test_report_of_a_failed_run_without_a_loss_says_that_all_was_there():
    report = build_report(History().first().steps(1, 10).end("failed", error="NaN", digest="").records)
    assert (report.steps.committed, report.invariants["no_step_lost"]) == (10, "held")


def test_report_counts_commits_that_arrive_after_the_end():
    history = History().first().steps(1, 10).end()
    history.records.insert(-3, history.records.pop())
    assert counts(history)[0].committed == 10
    assert counts(history)[2].broken == ()


def test_report_does_not_call_the_samples_of_an_unheard_first_step_lost():
    history = History().first().lose(1)
    history.recover("in-place", 1, slices=(0, 2)).steps(2, 20).end()
    steps, samples, report = counts(history)
    assert (steps.committed, steps.lost, samples.lost) == (20, 0, 0)
    assert report.broken == ()


def test_report_of_a_failed_run_keeps_what_its_newest_snapshot_holds():
    history = History().first().steps(1, 10).end("failed", error="loss is NaN", restorable=10)
    steps, samples, report = counts(history)
    assert (steps.committed, steps.lost, samples.lost) == (10, 0, 0)
    assert report.broken == ()


def test_report_leaves_unknown_what_a_history_without_an_end_cannot_tell():
    report = build_report(History().first().steps(1, 10).records)
    assert report.run.outcome == "failed"
    assert "no end" in report.run.error
    assert report.invariants["no_step_lost"] == report.invariants["no_sample_lost"] == "unknown"


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 35])
def test_lawful_epochs_never_count_as_repeated_wherever_the_run_ends(steps):
    assert counts(histories.undisturbed(steps))[1].repeated == 0


def test_repeated_ids_are_exact_when_the_epoch_is_known():
    history = History().first().steps(1, 3, change=with_ids(3, ids_at(0))).end()
    executions = list(trace_lineage(history.records).effective.values())
    assert count_repeated_ids(executions, EPOCH) == BATCH
    assert isinstance(executions[0], Execution)


@st.composite
def lawful_runs(draw):
    """A run with random changes of the world, each restored at an older step and continued rightly."""
    history = History(slices=4, target=None).first()
    newest = 0
    for _ in range(draw(st.integers(1, 5))):
        ahead = draw(st.integers(0, 6))
        history.steps(newest + 1, newest + ahead)
        newest += ahead
        restored = draw(st.integers(0, newest))
        slices = tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1))))
        history.lose(draw(st.sampled_from(history.world)))
        history.recover("in-place", restored or None, slices=slices)
        newest = restored
    return history, newest


@PROPERTY
@given(lawful_runs(), st.integers(0, 5))
def test_nothing_is_lost_or_repeated_when_every_world_goes_on_rightly(run, more):
    history, newest = run
    history.steps(newest + 1, max(history.newest, newest) + more).end()
    steps, samples, report = counts(history)
    assert (steps.lost, steps.repeated, samples.lost, samples.repeated) == (0, 0, 0, 0)
    assert steps.committed == history.newest
    assert samples.consumed == history.newest * BATCH
    assert report.broken == ()


@PROPERTY
@given(lawful_runs(), st.integers(1, 4))
def test_a_skipped_step_breaks_an_invariant_wherever_it_is(run, skipped):
    history, newest = run
    assume(history.newest > 0)  # a run whose very first step is missing shows it by its samples alone
    history.steps(newest + 1 + skipped, max(history.newest, newest + 1 + skipped)).end()
    steps, samples, report = counts(history)
    assert (steps.lost, samples.lost) == (skipped, skipped * BATCH)
    assert {"no_step_lost", "no_sample_lost"} <= set(report.broken)


@PROPERTY
@given(lawful_runs(), st.integers(1, 4))
def test_a_step_applied_twice_breaks_an_invariant_wherever_it_is(run, again):
    history, newest = run
    again = min(again, newest)
    history.steps(newest + 1 - again, max(history.newest, newest + 1)).end()
    steps, samples, report = counts(history)
    assert (steps.repeated, samples.repeated) == (again, again * BATCH)
    assert ("no_step_repeated" in report.broken) == (again > 0)
