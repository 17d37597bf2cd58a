"""Robust figures for the benchmarks: medians, percentiles, and how far a median can be trusted. Pure."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median with the bounds of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def spans(self, target: float) -> bool:
        """Whether the interval leaves open on which side of `target` the median is."""
        return self.low <= target < self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution in a few numbers."""

    num: int
    p50: float
    p90: float
    max: float

    def as_dict(self) -> dict[str, float]:
        """For JSON, rounded to a tenth of a millisecond where the values are seconds."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile. Raises ValueError for no values."""
    if not values:
        raise ValueError("no percentile of no values")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def spread(values: Sequence[float]) -> Spread:
    """Return p50, p90 and the largest. Raises ValueError for no values."""
    return Spread(
        num=len(values), p50=percentile(values, 50), p90=percentile(values, 90), max=percentile(values, 100)
    )


def median_interval(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Return the median and its 95 % percentile-bootstrap interval; the seed fixes the resampling.

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no median of no values")
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return Interval(
        median=statistics.median(values), low=percentile(medians, 2.5), high=percentile(medians, 97.5)
    )


def overheads(costs: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Return cost / base - 1 of each pair. Raises ValueError when lengths differ or a base is not above 0."""
    if any(base <= 0 for base in bases):
        raise ValueError("a base must be positive")
    return [cost / base - 1 for cost, base in zip(costs, bases, strict=True)]


def own_noise(values: Sequence[float]) -> float:
    """How much the same thing changes from time to time: the median of |b / a - 1| over neighbours."""
    changes = [abs(later / earlier - 1) for earlier, later in itertools.pairwise(values)]
    return statistics.median(changes) if changes else 0.0
