"""Samples of a run whose batch follows the number of slices: counted right, and a wrong replay is found."""

from collections.abc import Callable
from dataclasses import replace

import histories
from histories import History, ids_at

from elastic.records import StepCommitted
from elastic.report import build_report
from elastic.report_schema import Report

FULL, SMALL = histories.BATCH, 2
FIRST_SMALL, FIRST_FULL_AGAIN = 11, 15


def batch_of(step: int, *, first_small: int = FIRST_SMALL) -> tuple[int, int]:
    """Where in the stream the batch of a step begins, and its samples: fewer from one step to another."""
    sizes = [SMALL if first_small <= number < FIRST_FULL_AGAIN else FULL for number in range(1, step + 1)]
    return sum(sizes[:-1]), sizes[-1]


def sized(first_small: int = FIRST_SMALL) -> Callable[[StepCommitted], StepCommitted]:
    def change(commit: StepCommitted) -> StepCommitted:
        position, count = batch_of(commit.step, first_small=first_small)
        return replace(commit, position=position, sample_ids=ids_at(position, count))

    return change


def report_of(replayed: Callable[[StepCommitted], StepCommitted]) -> Report:
    """Slice 1 dies after step 10, steps 9 and 10 run again; it is back after step 14."""
    history = History().first().steps(1, 10, change=sized()).lose(1)
    history.recover("in-place", 8, slices=(0, 2)).steps(9, 10, change=replayed).phase("RUNNING")
    history.steps(11, 14, change=replayed)
    history.recover("scale-up", 14, slices=(0, 1, 2)).phase("RUNNING").steps(15, 20, change=replayed)
    return build_report(history.end().records)


def test_report_counts_the_samples_of_batches_of_several_sizes() -> None:
    report = report_of(sized())
    assert report.samples.consumed == 10 * FULL + 4 * SMALL + 6 * FULL
    assert (report.samples.lost, report.samples.repeated) == (0, 0)
    assert (report.steps.committed, report.steps.lost, report.steps.replayed) == (20, 0, 2)
    assert set(report.invariants.values()) == {"held"}


def test_report_finds_steps_that_ran_again_with_fewer_samples_than_they_had() -> None:
    report = report_of(sized(first_small=9))
    assert (report.steps.lost, report.steps.replayed) == (2, 0)
    assert report.samples.repeated == 0
    assert "no_step_lost" in report.broken


def test_report_finds_samples_that_a_smaller_replay_leaves_out() -> None:
    def shortened(commit: StepCommitted) -> StepCommitted:
        commit = sized()(commit)
        is_short = commit.step in (9, 10)
        return replace(commit, sample_ids=commit.sample_ids[:SMALL]) if is_short else commit

    report = report_of(shortened)
    assert report.samples.lost == 2 * (FULL - SMALL)
    assert set(report.broken) == {"no_step_lost", "no_sample_lost"}
