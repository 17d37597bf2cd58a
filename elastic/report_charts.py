"""Where things stand in the report's drawings: plain geometry, which the page's template turns into SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.history_lineage import Execution, Lineage, trace_lineage
from elastic.history_phases import end_of
from elastic.history_recoveries import real_worlds
from elastic.history_text import describe
from elastic.records import FaultInjected, LossDetected, Record, WorldFormed
from elastic.report_schema import Report

WIDTH = 1000
LEFT = 64
RIGHT = 16
LANE_HEIGHT = 26
LANE_GAP = 8
TOP = 28
LOSS_BOTTOM = 208
NUM_COLOURS = 6
MAX_POINTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A label or a sign at a point."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A rectangle with a text to show over it; `colour` counts from zero."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    text: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Lanes of slices over time."""

    height: float
    lanes: tuple[Mark, ...]
    worlds: tuple[Band, ...]
    recoveries: tuple[Band, ...]
    faults: tuple[Mark, ...]
    losses: tuple[Mark, ...]
    ticks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The loss of one generation's steps, as an SVG `points` list."""

    colour: int
    generation: int
    points: str
    dots: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChart:
    """Loss over steps; `undone` are the executions that were rolled back."""

    curves: tuple[Curve, ...]
    undone: tuple[Mark, ...]
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """From times and slices to places in the timeline."""

    start: float
    end: float
    y_of: dict[int, float]

    def x(self, unix_s: float) -> float:
        span = max(self.end - self.start, 1e-9)
        within = min(max(unix_s - self.start, 0.0), span)
        return round(LEFT + within / span * (WIDTH - LEFT - RIGHT), 2)

    @property
    def bottom(self) -> float:
        return TOP + len(self.y_of) * (LANE_HEIGHT + LANE_GAP)

    def band(self, since: float, until: float, y: float, height: float, **text: int | str) -> Band:
        width = round(max(2.0, self.x(until) - self.x(since)), 2)
        return Band(x=self.x(since), y=y, width=width, height=height, **text)  # type: ignore[arg-type]


def draw_timeline(records: Sequence[Record], report: Report) -> Timeline | None:
    """The run over time; None when it never had a world."""
    worlds = [world.formed for world in real_worlds(records, trace_lineage(records))]
    if not worlds:
        return None
    indices = sorted({*range(report.run.slices), *(index for world in worlds for index in world.slices)})
    y_of = {index: float(TOP + lane * (LANE_HEIGHT + LANE_GAP)) for lane, index in enumerate(indices)}
    axes = _Axes(start=report.run.started_unix_s, end=end_of(records), y_of=y_of)
    seconds = nice_ticks(0.0, axes.end - axes.start)
    return Timeline(
        height=axes.bottom + 28,
        lanes=tuple(Mark(x=0, y=y + LANE_HEIGHT / 2 + 4, text=f"slice {i}") for i, y in y_of.items()),
        worlds=_draw_worlds(records, worlds, axes),
        recoveries=_draw_recoveries(report, axes),
        faults=_signs([r for r in records if isinstance(r, FaultInjected)], axes),
        losses=_signs([r for r in records if isinstance(r, LossDetected)], axes),
        ticks=tuple(Mark(x=axes.x(axes.start + s), y=axes.bottom + 18, text=f"{s:g} s") for s in seconds),
    )


def _draw_worlds(records: Sequence[Record], worlds: Sequence[WorldFormed], axes: _Axes) -> tuple[Band, ...]:
    """A band for each slice of each world: until the slice is lost or the next world formed."""
    ends = [world.unix_s for world in worlds[1:]] + [axes.end]
    losses = [record for record in records if isinstance(record, LossDetected)]
    bands: list[Band] = []
    for number, (world, until) in enumerate(zip(worlds, ends, strict=True)):
        for index in world.slices:
            gone = [r.unix_s for r in losses if r.slice_index == index and world.unix_s <= r.unix_s < until]
            bands.append(
                axes.band(
                    world.unix_s,
                    min(gone, default=until),
                    axes.y_of[index],
                    LANE_HEIGHT,
                    colour=number % NUM_COLOURS,
                    text=f"slice {index}: {describe(world)}",
                    label=f"gen {world.generation}",
                )
            )
    return tuple(bands)


def _draw_recoveries(report: Report, axes: _Axes) -> tuple[Band, ...]:
    bands = []
    for number, recovery in enumerate(report.recoveries, 1):
        until = axes.end if recovery.resumed_unix_s is None else recovery.resumed_unix_s
        text = f"recovery {number}: {recovery.explanation}"
        height = axes.bottom - TOP + LANE_GAP
        since = recovery.fault_unix_s
        bands.append(axes.band(since, until, TOP - LANE_GAP, height, colour=0, text=text, label=f"#{number}"))
    return tuple(bands)


def _signs(records: Sequence[FaultInjected | LossDetected], axes: _Axes) -> tuple[Mark, ...]:
    """Signs in the lanes of their slices; those of no slice above all lanes."""
    middle = LANE_HEIGHT / 2
    return tuple(
        Mark(
            x=axes.x(record.unix_s),
            y=TOP - LANE_GAP
            if record.slice_index not in axes.y_of
            else axes.y_of[record.slice_index] + middle,
            text=f"{record.unix_s - axes.start:.2f} s: {describe(record)}",
        )
        for record in records
    )


def draw_losses(records: Sequence[Record]) -> LossChart | None:
    """Loss over steps, a curve a generation; None without two finite losses."""
    lineage = trace_lineage(records)
    shown = [one for one in lineage.executions.values() if _finite_loss(one) is not None]
    values = [loss for loss in map(_finite_loss, shown) if loss is not None]
    if len(shown) < 2:
        return None
    steps = [execution.step for execution in shown]
    x_low, x_high, y_low, y_high = min(steps), max(steps), min(values), max(values)

    def place(step: float, loss: float, text: str = "") -> Mark:
        right = (step - x_low) / max(x_high - x_low, 1) * (WIDTH - LEFT - RIGHT)
        up = (loss - y_low) / max(y_high - y_low, 1e-9) * (LOSS_BOTTOM - 16)
        return Mark(x=round(LEFT + right, 2), y=round(LOSS_BOTTOM - up, 2), text=text)

    undone = [one for one in lineage.rolled_back if _finite_loss(one) is not None]
    return LossChart(
        curves=_draw_curves(lineage, shown, place),
        undone=tuple(
            _place_execution(execution, place, " (rolled back)") for execution in undone[-MAX_POINTS:]
        ),
        x_ticks=tuple(place(step, y_low, f"{step:g}") for step in nice_ticks(x_low, x_high)),
        y_ticks=tuple(place(x_low, loss, f"{loss:g}") for loss in nice_ticks(y_low, y_high, 5)),
    )


def _draw_curves(
    lineage: Lineage, shown: Sequence[Execution], place: Callable[..., Mark]
) -> tuple[Curve, ...]:
    curves = []
    replayed = lineage.replayed
    generations = list(dict.fromkeys(execution.generation for execution in shown))
    for number, generation in enumerate(generations):
        own = [execution for execution in shown if execution.generation == generation]
        thinned = own[:: max(1, math.ceil(len(own) / MAX_POINTS))]
        points = [_place_execution(execution, place) for execution in [*thinned, own[-1]]]
        again = [e for e in own if e.step in replayed and lineage.effective.get(e.step) is e]
        curves.append(
            Curve(
                colour=number % NUM_COLOURS,
                generation=generation,
                points=" ".join(f"{mark.x},{mark.y}" for mark in points),
                dots=tuple(
                    _place_execution(execution, place, " (replayed)") for execution in again[-MAX_POINTS:]
                ),
            )
        )
    return tuple(curves)


def _place_execution(execution: Execution, place: Callable[..., Mark], note: str = "") -> Mark:
    loss = execution.loss or 0.0
    return place(
        execution.step, loss, f"step {execution.step}, generation {execution.generation}: {loss:.4f}{note}"
    )


def _finite_loss(execution: Execution) -> float | None:
    loss = execution.loss
    return loss if loss is not None and math.isfinite(loss) else None


def nice_ticks(low: float, high: float, most: int = 10) -> list[float]:
    """At most `most` round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    stride = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough)
    first, last = math.ceil(low / stride), math.floor(high / stride)
    return [round(number * stride, 10) for number in range(first, last + 1)]
