"""How often the state is captured: every k steps, every t seconds, or as often as a budget for the stall
allows. Pure: times are arguments.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import msgspec

from reshard.errors import UsageError

MAX_INTERVAL_STEPS = 10_000
MAX_INTERVAL_S = 60.0
SMOOTHING = 0.2
MIN_STEP_S = 1e-9  # nothing that was measured; a fraction of it must not become zero
"""The weight of a new sample; a sample counts as at most twice what was expected, so that one long
evaluation, say, does not pass for a slow step.
"""
HYSTERESIS = 0.8
"""An interval that is shorter by less than this factor is not worth a change."""
_FORM = "Give steps (5), seconds (2s) or a budget for the stall (auto:3%)."


class EverySteps(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Capture after each k-th step. Raises UsageError for less than one."""

    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"snapshots every {self.steps} steps cannot be", remedy=_FORM)


class EverySeconds(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Capture after the first step that ends `seconds` after the last capture. Raises UsageError for none."""

    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"snapshots every {self.seconds:g} seconds cannot be", remedy=_FORM)


class StallBudget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Capture as often as can be while the loop is held for at most `fraction` of its time without captures.

    At least once in `max_interval_steps` and `max_interval_s`, whatever it costs: a budget that cannot be
    kept must not mean that there are no snapshots. Raises UsageError for a fraction that is not in (0, 1).
    """

    fraction: float
    max_interval_steps: int = MAX_INTERVAL_STEPS
    max_interval_s: float = MAX_INTERVAL_S

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise UsageError(
                f"a budget of {100 * self.fraction:g} % for the stall cannot be",
                remedy="It must be above 0 % and below 100 %.",
            )
        if self.max_interval_steps < 1 or not self.max_interval_s > 0:
            raise UsageError("the longest interval between snapshots must be at least a step")


Cadence = EverySteps | EverySeconds | StallBudget
EVERY_STEP = EverySteps()


def parse_cadence(text: str) -> Cadence:
    """Read `5` (steps), `2s` (seconds) or `auto:3%` (budget for the stall). Raises UsageError."""
    number = r"(\d+(?:\.\d+)?)"
    if re.fullmatch(r"\d{1,18}", text):
        return EverySteps(steps=int(text))
    if seconds := re.fullmatch(number + "s", text):
        return EverySeconds(seconds=float(seconds[1]))
    if percent := re.fullmatch(f"auto:{number}%", text):
        return StallBudget(fraction=float(percent[1]) / 100)
    raise UsageError(f"{text!r} does not say how often to take snapshots", remedy=_FORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one process knows about its steps and captures in a world, in seconds.

    `step_s` is a step without its stall and `stall_s` what a capture holds the loop for, both smoothed
    (0: none seen). `debt_s` is stall that the budget has not covered yet. `since_steps` and `since_s`
    count from the newest capture.
    """

    step_s: float = 0.0
    stall_s: float = 0.0
    debt_s: float = 0.0
    since_steps: int = 0
    since_s: float = 0.0

    def after_step(self, cadence: Cadence, work_s: float, *, compile_s: float = 0.0) -> Measured:
        """What is known after one more step that took `work_s`, of which `compile_s` will not come again."""
        return replace(
            self,
            step_s=_smooth(self.step_s, max(work_s - compile_s, 0.0)),
            debt_s=max(self.debt_s - _fraction(cadence) * work_s, 0.0),
            since_steps=self.since_steps + 1,
            since_s=self.since_s + work_s,
        )

    def after_capture(self, cadence: Cadence, stall_s: float) -> Measured:
        """What is known after a capture that held the loop for `stall_s`."""
        known = self.after_stall(cadence, stall_s)
        return replace(known, stall_s=_smooth(self.stall_s, stall_s), since_steps=0, since_s=0.0)

    def after_stall(self, cadence: Cadence, stall_s: float) -> Measured:
        """What is known after the loop was held for `stall_s` by what is no whole capture."""
        debt_s = self.debt_s + stall_s
        if isinstance(cadence, StallBudget):  # what the longest interval cannot pay for is never paid
            debt_s = min(debt_s, cadence.fraction * cadence.max_interval_s)
        return replace(self, debt_s=debt_s)


def next_interval(cadence: Cadence, measured: Measured, current: int = 1) -> int:
    """Steps from the newest capture to the next, at least 1; `current` is the interval in force.

    Of a budget: the smallest k with stall / (k × step) within it, but so many that what was overdrawn
    so far is paid back too.
    """
    if isinstance(cadence, EverySteps):
        return cadence.steps
    if measured.step_s < MIN_STEP_S:
        return 1
    if isinstance(cadence, EverySeconds):
        left_s = max(cadence.seconds - measured.since_s, 0.0)
        return max(measured.since_steps + _ceil(left_s / measured.step_s), 1)
    a_step_pays_s = cadence.fraction * measured.step_s
    wanted = max(
        _ceil(measured.stall_s / a_step_pays_s),
        measured.since_steps + _ceil(measured.debt_s / a_step_pays_s) if measured.debt_s > 0 else 1,
        1,
    )
    if HYSTERESIS * current <= wanted < current:
        wanted = current
    left_s = max(cadence.max_interval_s - measured.since_s, 0.0)
    longest = measured.since_steps + _whole(left_s / measured.step_s)
    return max(min(wanted, longest, cadence.max_interval_steps), 1)


def longest_interval(cadence: Cadence) -> int:
    """The most steps that may lie between two captures (a guess where seconds decide)."""
    match cadence:
        case EverySteps():
            return cadence.steps
        case EverySeconds():
            return MAX_INTERVAL_STEPS
        case StallBudget():
            return cadence.max_interval_steps


def _fraction(cadence: Cadence) -> float:
    return cadence.fraction if isinstance(cadence, StallBudget) else 0.0


def _smooth(known: float, sample: float) -> float:
    return sample if known <= 0 else known + SMOOTHING * (min(sample, 2 * known) - known)


def _ceil(steps: float) -> int:
    """Whole steps, not one more for a rounding error, and no more than a message carries."""
    return math.ceil(min(steps, 1e9) * (1 - 1e-12))


def _whole(steps: float) -> int:
    return math.floor(min(steps, 1e9))
