"""Which steps are captured: the same in all processes, and never the last whole snapshot overwritten."""

from __future__ import annotations

import pytest

from elastic.cadence import EVERY_STEP, Cadence, EverySteps, StallBudget
from elastic.pace import REVIEW_STEPS, Decision, Pace


def captured_steps(pace: Pace, steps: range, num_steps: int | None = None) -> list[int]:
    found = []
    for step in steps:
        if pace.decide(step, num_steps) is Decision.CAPTURE:
            pace.captured(step)
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("every", "restored", "steps", "expected"),
    [
        (1, None, range(4), [0, 1, 2, 3]),
        (4, None, range(14), [0, 3, 7, 11, 13]),
        (4, 5, range(6, 14), [7, 11, 13]),
        (4, 7, range(8, 14), [11, 13]),
        (100, None, range(14), [0, 13]),
    ],
)
def test_every_kth_step_is_captured_and_the_first_and_last(
    every: int, restored: int | None, steps: range, expected: list[int]
) -> None:
    pace = Pace(EverySteps(steps=every), captured_step=restored)
    assert captured_steps(pace, steps, num_steps=14) == expected
    assert not pace.needs_agreement
    assert not any(pace.must_propose(step) for step in steps)


def test_agreed_interval_counts_from_the_newest_capture() -> None:
    pace = Pace(StallBudget(fraction=0.1))
    assert captured_steps(pace, range(1)) == [0]
    assert pace.must_propose(0)
    pace.agree(5, 0)
    assert captured_steps(pace, range(1, 12)) == [5, 10]


def test_interval_is_reviewed_while_nothing_is_captured() -> None:
    pace = Pace(StallBudget(fraction=0.1), captured_step=10)
    pace.agree(1000, 0)
    asked = [step for step in range(11, 60) if pace.must_propose(step)]
    assert asked == [10 + REVIEW_STEPS, 10 + 2 * REVIEW_STEPS, 10 + 3 * REVIEW_STEPS]


@pytest.mark.parametrize("cadence", [EVERY_STEP, EverySteps(steps=3), StallBudget(fraction=0.1)])
def test_due_capture_is_skipped_until_the_newest_is_copied_everywhere(cadence: Cadence) -> None:
    pace = Pace(cadence, captured_step=2, needs_copies=True)
    assert pace.needs_agreement
    assert [pace.decide(step, None) for step in (5, 6)] == [Decision.SKIP, Decision.SKIP]
    assert not pace.is_copied
    assert pace.must_propose(5)
    pace.agree(1, 1)
    assert pace.decide(6, None) is Decision.SKIP
    pace.agree(1, 2)
    assert pace.decide(7, None) is Decision.CAPTURE
    pace.captured(7)
    assert not pace.is_copied


def test_copies_are_asked_for_again_and_again_and_a_step_before_they_are_needed() -> None:
    pace = Pace(EverySteps(steps=20), captured_step=19, needs_copies=True)
    assert [step for step in range(20, 39) if pace.must_propose(step)] == [20, 21, 23, 27, 35, 38]
    pace.agree(20, 19)
    assert not any(pace.must_propose(step) for step in range(20, 39))
    assert captured_steps(pace, range(20, 41)) == [39]
