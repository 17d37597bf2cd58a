"""What bench_recovery makes of reports and histories. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from figures import spread

from elastic.records import FaultInjected, Record, StepCommitted, WorldFormed, of_kind

SETTLING_STEPS = 3
MTTR_TARGET_S = 1.0
STEP_FACTOR = 4
STEP_SLACK_S = 0.4
IN_PLACE_TARGET = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One recovery from a kill, with the run's own steady step before it. `mttr_s` None: it never resumed."""

    fault: str
    mode: str
    step_s: float
    mttd_s: float
    mttr_s: float | None
    phases_s: dict[str, float]
    rejoin_s: float | None

    @property
    def allowed_s(self) -> float:
        """The bound that is relative to the run's own step."""
        return STEP_FACTOR * self.step_s + STEP_SLACK_S

    @property
    def in_bounds(self) -> bool:
        """Whether it kept both bounds."""
        return self.mttr_s is not None and self.mttr_s <= min(MTTR_TARGET_S, self.allowed_s)


def steady_step_s(records: Sequence[Record]) -> float | None:
    """Median step of the first world that trains, before the first fault and after its first steps; None
    without any.

    Of each step the slowest slice counts: the others wait for it.
    """
    worlds = [world for world in of_kind(records, WorldFormed) if world.mode != "rehearsal"]
    if not worlds:
        return None
    end_s = min((fault.unix_s for fault in of_kind(records, FaultInjected)), default=float("inf"))
    slowest: dict[int, float] = {}
    for commit in of_kind(records, StepCommitted):
        if commit.generation == worlds[0].generation and commit.unix_s < end_s:
            slowest[commit.step] = max(slowest.get(commit.step, 0.0), commit.step_s)
    steady = [step_s for step, step_s in sorted(slowest.items())][SETTLING_STEPS:]
    return statistics.median(steady) if steady else None


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """Distributions and fractions for the JSON line. Raises ValueError for no samples."""
    resumed = [sample.mttr_s for sample in samples if sample.mttr_s is not None]
    in_place = [sample for sample in samples if sample.mode == "in-place"]
    rejoins = [sample.rejoin_s for sample in samples if sample.rejoin_s is not None]
    return {
        "recoveries": len(samples),
        "resumed": len(resumed),
        "in_place": _fraction(len(in_place), len(samples)),
        "in_bounds": _fraction(sum(sample.in_bounds for sample in samples), len(samples)),
        "in_bounds_of_in_place": _fraction(sum(sample.in_bounds for sample in in_place), len(in_place)),
        "step_s": spread([sample.step_s for sample in samples]).as_dict(),
        "mttd_s": spread([sample.mttd_s for sample in samples]).as_dict(),
        "mttr_s": spread(resumed).as_dict() if resumed else None,
        "mttr_in_place_s": _spread_of(in_place),
        "mttr_respawn_s": _spread_of([sample for sample in samples if sample.mode == "respawn"]),
        "mttr_x_step": spread([s.mttr_s / s.step_s for s in samples if s.mttr_s is not None]).as_dict()
        if resumed
        else None,
        "rejoin_s": spread(rejoins).as_dict() if rejoins else None,
        "phases_s": {
            phase: spread([sample.phases_s[phase] for sample in samples]).as_dict()
            for phase in samples[0].phases_s
        },
    }


def _spread_of(samples: Sequence[Sample]) -> dict[str, float] | None:
    values = [sample.mttr_s for sample in samples if sample.mttr_s is not None]
    return spread(values).as_dict() if values else None


def _fraction(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None
