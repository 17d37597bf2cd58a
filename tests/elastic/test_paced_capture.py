"""Captures at their cadence, with fake capturers, a fake link and real (single-process) agreement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from elastic.agreement import Agreement, one_device_a_process
from elastic.cadence import EVERY_STEP, Cadence, EverySteps, StallBudget
from elastic.paced_capture import COPIES_BOUND_S, PacedCapture
from elastic.ports import Link, WorldLost
from snapshot.capture import Capturer

STEP_S = 0.1


class Clock:
    """Moved by what takes time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeCapturer:
    """Notes what it is asked for; a capture takes `cost_s`."""

    def __init__(self, clock: Clock, cost_s: float = 0.01, *, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.cost_s = cost_s
        self.calls: list[str] = []
        self._clock = clock
        self._open: int | None = None
        self.in_flight = False
        """Set by a test: whether what was started takes longer."""

    def capture(self, state: Any, *, step: int, generation: int, position: int) -> Any:
        assert self._open is None
        self._clock.now_s += self.cost_s
        self.calls.append(f"capture {step}")
        return SimpleNamespace(captured_bytes=8)

    def start(self, state: Any, *, step: int, generation: int, position: int) -> None:
        assert self._open is None
        self._open = step
        self.calls.append(f"start {step}")

    def finish(self) -> Any:
        assert self._open is not None
        self.calls.append(f"finish {self._open}")
        self._open = None
        return SimpleNamespace(captured_bytes=8)


class FakeLink:
    """Says which step is copied; fenced after so many looks."""

    def __init__(self, clock: Clock, copied: int | None = None) -> None:
        self.copied = copied
        self.fenced = False
        self._clock = clock

    def replicated_step(self, generation: int) -> int | None:
        self._clock.now_s += 1.0 if self.copied is not None and self.copied < 0 else 0.0
        return self.copied

    def is_fenced(self, generation: int) -> bool:
        return self.fenced


def paced(
    cadence: Cadence, capturer: FakeCapturer, clock: Clock, link: FakeLink | None = None
) -> PacedCapture:
    return PacedCapture(
        cadence,
        [cast(Capturer, capturer)],
        jax.devices(),
        cast(Link, link or FakeLink(clock)),
        1,
        clock=clock,
    )


def take(made: PacedCapture, step: int, num_steps: int | None = None, *, is_leaving: bool = False) -> Any:
    return made.after_step(
        None, step, step, num_steps=num_steps, is_leaving=is_leaving, work_s=STEP_S, compile_s=0.0
    )


def test_fixed_steps_agree_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.paced_capture.Agreement", None)  # calling it would raise
    clock = Clock()
    capturer = FakeCapturer(clock)
    made = paced(EverySteps(steps=3), capturer, clock)
    results = [take(made, step, 8) for step in range(8)]
    assert capturer.calls == ["capture 0", "capture 2", "capture 5", "capture 7"]
    assert [round(result.stall_s, 3) for result in results[:3]] == [0.01, 0.0, 0.01]
    assert [result.captured_bytes for result in results[:3]] == [8, 0, 8]
    assert {(result.skipped, result.interval_steps) for result in results} == {(False, 3)}


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.5])
def test_budget_is_kept_and_used(fraction: float) -> None:
    clock = Clock()
    capturer = FakeCapturer(clock, cost_s=0.02)
    made = paced(StallBudget(fraction=fraction), capturer, clock)
    results = [take(made, step) for step in range(400)]
    spent = sum(result.stall_s for result in results) / (400 * STEP_S)
    assert fraction * 0.7 < spent <= fraction * 1.06 or results[-1].interval_steps == 1
    assert results[-1].interval_steps == max(round(0.02 / (fraction * STEP_S)), 1)


def test_copies_that_are_late_make_captures_skipped_and_counted() -> None:
    clock = Clock()
    capturer, link = FakeCapturer(clock), FakeLink(clock, copied=-1)
    made = paced(EVERY_STEP, capturer, clock, link)
    assert [take(made, step).skipped for step in range(4)] == [False, True, True, True]
    link.copied = 0
    take(made, 4)  # proposes what is read at the next step
    assert not take(made, 5).skipped
    assert capturer.calls == ["capture 0", "capture 5"]


def test_last_step_waits_for_copies_but_not_for_ever() -> None:
    clock = Clock()
    capturer, link = FakeCapturer(clock), FakeLink(clock, copied=-1)
    made = paced(EVERY_STEP, capturer, clock, link)
    take(made, 0, 2)
    result = take(made, 1, 2)
    assert result.skipped
    assert COPIES_BOUND_S <= result.stall_s <= COPIES_BOUND_S + 5
    link.copied = 0
    assert take(made, 1, 2).captured_bytes == 8


def test_wait_for_copies_ends_with_the_world() -> None:
    clock = Clock()
    link = FakeLink(clock, copied=-1)
    made = paced(EVERY_STEP, FakeCapturer(clock), clock, link)
    take(made, 0, 2)
    link.fenced = True
    with pytest.raises(WorldLost):
        take(made, 1, 2)


def test_world_is_left_with_a_snapshot_of_its_last_step() -> None:
    clock = Clock()
    capturer = FakeCapturer(clock)
    made = paced(EverySteps(steps=10), capturer, clock)
    for step in range(4):
        take(made, step, is_leaving=step == 3)
    assert capturer.calls == ["capture 0", "capture 3"]


def test_overlapping_capture_is_complete_on_every_host_before_the_next_begins() -> None:
    clock = Clock()
    capturer = FakeCapturer(clock, overlaps=True)
    made = paced(EVERY_STEP, capturer, clock)
    results = [take(made, step) for step in range(7)]
    # The first is complete at once: without it a loss would lose a committed step.
    assert capturer.calls == [
        "capture 0",
        "start 1",
        "finish 1",
        "start 3",
        "finish 3",
        "start 5",
        "finish 5",
    ]
    assert [result.captured_bytes for result in results] == [8, 0, 8, 0, 8, 0, 8]
    assert [result.skipped for result in results] == [False, False, True, False, True, False, True]


def test_overlapping_capture_that_takes_long_is_not_waited_for() -> None:
    clock = Clock()
    capturer = FakeCapturer(clock, overlaps=True)
    made = paced(EVERY_STEP, capturer, clock)
    take(made, 0)
    take(made, 1)
    capturer.in_flight = True
    assert [take(made, step).skipped for step in (2, 3, 4)] == [True] * 3
    assert capturer.calls == ["capture 0", "start 1"]
    capturer.in_flight = False
    assert take(made, 5).captured_bytes == 8
    assert not take(made, 6).skipped
    assert capturer.calls == ["capture 0", "start 1", "finish 1", "start 6"]
    assert made.finish() == 8
    assert made.finish() == 0


def test_last_step_is_captured_even_while_another_is_in_flight() -> None:
    clock = Clock()
    capturer = FakeCapturer(clock, overlaps=True)
    made = paced(EverySteps(steps=2), capturer, clock)
    take(made, 0, 3)
    take(made, 1, 3)
    capturer.in_flight = True
    assert take(made, 2, 3).captured_bytes == 16
    assert capturer.calls == ["capture 0", "start 1", "finish 1", "capture 2"]


# ---- agreement ----


def test_one_device_of_each_process_takes_part_in_the_order_given() -> None:
    devices = [
        SimpleNamespace(process_index=process, id=id_) for process, id_ in [(1, 5), (0, 0), (1, 4), (0, 1)]
    ]
    assert [device.id for device in one_device_a_process(cast(Any, devices))] == [5, 0]


def test_process_alone_agrees_with_itself_without_a_program() -> None:
    agreement = Agreement(jax.devices(), width=2)
    assert not agreement.is_pending
    agreement.propose((7, -3))
    assert agreement.is_pending
    assert agreement.read() == (7, -3)
    assert not agreement.is_pending


def test_numbers_that_do_not_fit_are_refused() -> None:
    agreement = Agreement(jax.devices(), width=2)
    with pytest.raises(OverflowError):
        agreement.propose((2**31, 0))
    with pytest.raises(ValueError, match="3 numbers"):
        agreement.propose((1, 2, 3))


def test_reduction_gives_the_largest_of_each() -> None:
    from elastic.agreement import _largest

    assert np.array_equal(jax.jit(_largest)(np.array([[1, -4], [3, -9], [2, -5]], np.int32)), [3, -4])
