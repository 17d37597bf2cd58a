"""Cadences: what the command line says, and intervals from what was measured."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.cadence import (
    EVERY_STEP,
    Cadence,
    EverySeconds,
    EverySteps,
    Measured,
    StallBudget,
    next_interval,
    parse_cadence,
)
from elastic.pace import REVIEW_STEPS, Decision, Pace
from reshard.errors import UsageError

CADENCES = [
    ("1", EVERY_STEP),
    ("5", EverySteps(steps=5)),
    ("2s", EverySeconds(seconds=2)),
    ("0.5s", EverySeconds(seconds=0.5)),
    ("auto:3%", StallBudget(fraction=0.03)),
    ("auto:0.5%", StallBudget(fraction=0.005)),
]


@pytest.mark.parametrize(("text", "cadence"), CADENCES)
def test_text_and_json_say_the_same_cadence(text: str, cadence: Cadence) -> None:
    assert parse_cadence(text) == cadence
    assert msgspec.json.decode(msgspec.json.encode(cadence), type=Cadence) == cadence


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "2 s", "s", "auto", "auto:3", "auto:%", "3%", "5steps", "1e3"]
)
def test_other_text_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match=r"how often.*auto:3%"):
        parse_cadence(text)


@pytest.mark.parametrize("text", ["0", "0s", "auto:0%", "auto:100%", "9" * 400 + "s"])
def test_numbers_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be"):
        parse_cadence(text)


def test_budget_gives_the_smallest_interval_that_keeps_it() -> None:
    measured = Measured(step_s=0.1, stall_s=0.01)
    intervals = {f: next_interval(StallBudget(fraction=f), measured) for f in (0.5, 0.1, 0.05, 0.03, 0.01)}
    assert intervals == {0.5: 1, 0.1: 1, 0.05: 2, 0.03: 4, 0.01: 10}


def test_seconds_are_counted_from_the_newest_capture() -> None:
    cadence = EverySeconds(seconds=2)
    assert next_interval(cadence, Measured()) == 1
    assert next_interval(cadence, Measured(step_s=0.3)) == 7
    assert next_interval(cadence, Measured(step_s=0.3, since_steps=4, since_s=1.2)) == 7
    assert next_interval(cadence, Measured(step_s=3.0, since_steps=4, since_s=1.2)) == 5
    assert next_interval(cadence, Measured(step_s=0.3, since_steps=4, since_s=9.0)) == 4


def test_interval_in_force_stays_when_a_shorter_one_gains_little() -> None:
    cadence = StallBudget(fraction=0.01)
    assert next_interval(cadence, Measured(step_s=0.1, stall_s=0.009), current=10) == 10
    assert next_interval(cadence, Measured(step_s=0.1, stall_s=0.007), current=10) == 7
    assert next_interval(cadence, Measured(step_s=0.1, stall_s=0.011), current=10) == 11


def test_compiling_is_not_taken_for_a_slow_step() -> None:
    measured = Measured().after_step(EVERY_STEP, 5.1, compile_s=5.0)
    assert measured.step_s == pytest.approx(0.1)
    assert measured.since_s == 5.1


@given(
    step_s=st.floats(0, 1e6),
    stall_s=st.floats(0, 1e6),
    debt_s=st.floats(0, 1e6),
    since_steps=st.integers(0, 10**6),
    since_s=st.floats(0, 1e9),
    current=st.integers(1, 10**6),
    cadence=st.sampled_from([cadence for _, cadence in CADENCES]),
)
@example(
    cadence=StallBudget(fraction=0.03),
    current=1,
    step_s=5e-324,
    stall_s=1.0,
    debt_s=0.0,
    since_steps=0,
    since_s=0.0,
)
def test_interval_is_at_least_a_step_and_bounded(cadence: Cadence, current: int, **measured: float) -> None:
    interval = next_interval(cadence, Measured(**measured), current)  # type: ignore[arg-type]
    assert 1 <= interval <= 2 * 10**9
    if isinstance(cadence, StallBudget):
        assert interval <= cadence.max_interval_steps


# ---- simulated runs: several processes, noise, sudden changes ----


@dataclass
class Run:
    """What came of a simulated run; seconds."""

    work_s: float = 0.0
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
    longest_gap_s: float = 0.0
    longest_step_s: float = 0.0
    captures: int = 0


def simulate(cadence: Cadence, seed: int, num_steps: int = 1500, num_processes: int = 3) -> Run:
    """Steps and stalls that change at times; processes agree one step late, as `PacedCapture` does."""
    rng = random.Random(seed)
    paces = [Pace(cadence) for _ in range(num_processes)]
    known = [Measured() for _ in range(num_processes)]
    run, proposed, gap_s = Run(), None, 0.0
    step_s, copy_s = 10 ** rng.uniform(-2, 0.5), 10 ** rng.uniform(-3, -0.5)
    for step in range(num_steps):
        if rng.random() < 0.003:
            step_s, copy_s = 10 ** rng.uniform(-2, 0.5), 10 ** rng.uniform(-3, -0.5)
        work_s = step_s * rng.uniform(0.7, 1.3) * (20 if rng.random() < 0.01 else 1)
        stalls_s = [copy_s * rng.uniform(0.6, 1.4) * (20 if rng.random() < 0.1 else 1) for _ in paces]
        known = [one.after_step(cadence, work_s) for one in known]
        if proposed is not None:
            for pace in paces:
                pace.agree(max(proposed), -1)
            proposed = None
        (decision,) = {pace.decide(step, num_steps) for pace in paces}
        run.work_s += work_s
        gap_s += work_s
        run.longest_step_s = max(run.longest_step_s, work_s)
        run.longest_gap_s = max(run.longest_gap_s, gap_s)
        if decision is Decision.CAPTURE:
            known = [
                one.after_capture(cadence, stall_s) for one, stall_s in zip(known, stalls_s, strict=True)
            ]
            for pace in paces:
                pace.captured(step)
            run.captures += 1
            run.stall_s += max(stalls_s)
            run.longest_stall_s = max(run.longest_stall_s, *stalls_s)
            gap_s = 0.0
        (must_propose,) = {pace.must_propose(step) for pace in paces}
        if must_propose:
            proposed = [
                next_interval(cadence, one, pace.interval_steps)
                for one, pace in zip(known, paces, strict=True)
            ]
    return run


@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 2**32), percent=st.sampled_from([0.5, 1, 3, 5, 20]))
def test_any_budget_is_kept_in_the_long_run(seed: int, percent: float) -> None:
    cadence = StallBudget(fraction=percent / 100, max_interval_s=1e9)
    run = simulate(cadence, seed, num_processes=1)
    assert run.captures >= 2
    assert run.stall_s <= cadence.fraction * run.work_s + 2 * run.longest_stall_s


@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 2**32), percent=st.sampled_from([0.1, 1, 5]), bound_s=st.sampled_from([5.0, 60.0]))
def test_budget_never_starves_the_snapshots(seed: int, percent: float, bound_s: float) -> None:
    run = simulate(StallBudget(fraction=percent / 100, max_interval_s=bound_s), seed)
    assert run.longest_gap_s <= bound_s + (REVIEW_STEPS + 2) * run.longest_step_s


@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 2**32))
def test_seconds_between_captures_are_kept_within_a_review(seed: int) -> None:
    run = simulate(EverySeconds(seconds=4.0), seed)
    assert run.longest_gap_s <= 4.0 + (REVIEW_STEPS + 2) * run.longest_step_s
    assert run.captures >= run.work_s / (4.0 + (REVIEW_STEPS + 2) * run.longest_step_s) - 1
