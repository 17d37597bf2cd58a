"""How long a step may take, and who has not arrived: the pure half of the step watchdog."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.detector_events import StacksTaken
from elastic.step_watch import ANSWER_S, KEPT, LONGEST, LOOKS, MEDIANS, StepWatch

WORLD = (0, 2, 5)
FLOOR_S, FIRST_S = 30.0, 600.0


def trained(*intervals_s: float, compile_s: float = 0.0) -> StepWatch:
    watch, now_s = StepWatch().restarted(1, 0.0), 100.0
    watch = watch.committed(1, 0, now_s, 90.0)
    for step, interval_s in enumerate(intervals_s, 1):
        now_s += interval_s
        watch = watch.committed(1, step, now_s, compile_s)
    return watch


def looked(watch: StepWatch, *in_script: int, silent: tuple[int, ...] = ()) -> StepWatch:
    watch = watch.asked(200.0)
    for index in WORLD:
        if index not in silent:
            there = index in in_script
            watch = watch.answered(
                StacksTaken(member=index, generation=1, in_script=there, where="f (train.py:3)")
            )
    return watch


def judged(watch: StepWatch, *in_script: int, silent: tuple[int, ...] = ()) -> tuple[StepWatch, str]:
    verdict = "look again"
    for _ in range(LOOKS):
        assert verdict == "look again"
        watch, verdict = looked(watch, *in_script, silent=silent).judge(WORLD)
    return watch, verdict


@given(st.lists(st.floats(0.01, 100.0), max_size=80))
def test_bound_is_never_below_the_floor_nor_below_any_step_that_was_kept(intervals: list[float]) -> None:
    watch = trained(*intervals)
    bound_s = watch.bound_s(FLOOR_S, FIRST_S)
    assert bound_s >= FLOOR_S
    assert len(watch.intervals_s) == min(len(intervals), KEPT)
    assert all(bound_s >= LONGEST * kept for kept in watch.intervals_s)
    assert not watch.is_overdue(watch.progress_s + bound_s * 0.99, FLOOR_S, FIRST_S)
    assert watch.is_overdue(watch.progress_s + bound_s * 1.01, FLOOR_S, FIRST_S)


def test_bound_is_learned_from_the_median_where_steps_are_long() -> None:
    assert trained(9.0, 10.0, 11.0).bound_s(FLOOR_S, FIRST_S) == pytest.approx(MEDIANS * 10.0)
    assert trained(1.0, 1.0, 40.0).bound_s(FLOOR_S, FIRST_S) == pytest.approx(LONGEST * 40.0)


def test_steps_that_compile_and_the_first_of_a_world_teach_nothing() -> None:
    assert trained(50.0, 60.0, compile_s=45.0).intervals_s == ()
    assert trained(2.0).restarted(2, 500.0).committed(2, 9, 560.0, 0.0).intervals_s == pytest.approx((2.0,))


def test_first_step_of_a_world_has_time_to_compile() -> None:
    watch = trained(1.0).restarted(2, 500.0)
    assert not watch.is_overdue(500.0 + FIRST_S - 1, FLOOR_S, FIRST_S)
    assert watch.is_overdue(500.0 + FIRST_S, FLOOR_S, FIRST_S)


def test_step_counts_once_however_many_slices_commit_it() -> None:
    watch = trained(1.0, 1.0)
    assert watch.committed(1, 2, watch.progress_s + 7.0, 0.0) == watch


def test_slice_in_the_script_while_the_others_wait_is_missing() -> None:
    watch, verdict = judged(trained(1.0), 2)
    assert (watch.missing, verdict) == ((2,), "missing")
    assert watch.where(2) == "in the script, f (train.py:3)"
    assert watch.where(0) == "waiting in f (train.py:3)"


def test_slice_that_does_not_answer_is_missing_and_is_waited_for() -> None:
    watch = looked(trained(1.0), silent=(5,))
    assert not watch.is_answered(WORLD, 200.0 + ANSWER_S / 2)
    assert watch.is_answered(WORLD, 200.0 + ANSWER_S)
    watch, verdict = judged(trained(1.0), silent=(5,))
    assert (watch.missing, verdict) == ((5,), "missing")
    assert "no answer" in watch.where(5)


def test_nobody_is_missing_where_all_are_in_the_script_or_none_is() -> None:
    assert judged(trained(1.0), *WORLD)[1] == "all in the script"
    assert judged(trained(1.0))[1] == "all arrived"


def test_slices_that_move_between_two_looks_are_slow_and_get_more_time() -> None:
    watch, _ = looked(trained(1.0), 2).judge(WORLD)
    watch, verdict = looked(watch, 0).judge(WORLD)
    assert (verdict, watch.looks, watch.asked_s, watch.patience) == ("look again", 0, None, 2.0)


def test_commit_ends_every_suspicion() -> None:
    watch, _ = looked(trained(1.0), 2).judge(WORLD)
    after = watch.committed(1, 2, 300.0, 0.0)
    assert (after.looks, after.asked_s, after.patience) == (0, None, 1.0)


def test_answer_that_nobody_asked_for_changes_nothing() -> None:
    watch = trained(1.0)
    answer = StacksTaken(member=0, generation=1, in_script=True, where="late")
    assert watch.answered(answer) == watch
