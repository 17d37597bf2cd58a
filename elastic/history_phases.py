"""How long a recovery took, and what each part of that time went into.

A recovery begins at its first fault: the injector's time, or the last sign of life of what died; without a
loss when the machine suspected one or began to fence (scale-up). From the detection on, time belongs to the
phase the state machine was in, until the first new step is committed: SUSPECT and FENCING are *fence*,
RUNNING before the replay too, after it *replay*. What the first committed step of the new generation spent
compiling is moved from *replay* to *rebuild*; WAITING is *wait*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.records import FaultInjected, LossDetected, PhaseEntered, Record, RunEnded
from elastic.report_schema import PHASES

_BUCKET_OF_PHASE = {
    "SUSPECT": "fence",
    "FENCING": "fence",
    "PLANNING": "plan",
    "RESTORING": "restore",
    "REBUILDING": "rebuild",
    "REPLAYING": "replay",
    "WAITING": "wait",
}

_FIRST_PHASES = ("SUSPECT", "FENCING", "PLANNING")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The time one recovery took, by bucket (the phases and `wait`), until it resumed or the run ended."""

    fault_unix_s: float
    detected_unix_s: float
    end_unix_s: float
    seconds: dict[str, float]


def end_of(records: Sequence[Record]) -> float:
    """When the run ended, or the last thing known of it happened."""
    ends = [record.unix_s for record in records if isinstance(record, RunEnded)]
    return ends[-1] if ends else max((record.unix_s for record in records), default=0.0)


def losses_between(records: Sequence[Record], since: int, until: int) -> list[LossDetected]:
    """The losses after record `since` and before record `until`."""
    return [record for record in records[since + 1 : until] if isinstance(record, LossDetected)]


def _fault_unix_s(records: Sequence[Record], loss: LossDetected) -> float:
    faults = [
        record.unix_s
        for record in records
        if isinstance(record, FaultInjected)
        and (record.slice_index == loss.slice_index or ":service@" in record.detail)
        and record.unix_s <= loss.unix_s
    ]
    earlier = [
        record.unix_s
        for record in records
        if isinstance(record, LossDetected)
        and record.slice_index == loss.slice_index
        and record.unix_s < loss.unix_s
    ]
    fault, previous_loss = max(faults, default=None), max(earlier, default=None)
    if fault is None or (previous_loss is not None and fault <= previous_loss):
        return min(loss.last_life_unix_s, loss.unix_s)
    return fault


def measure_span(
    records: Sequence[Record], since: int, until: int, end_unix_s: float, compile_s: float
) -> Span:
    """Divide the time from the first fault after record `since` to `end_unix_s` among phases."""
    phases = _phases(records[since + 1 :])
    losses = losses_between(records, since, until)
    if losses:
        detected = min(loss.unix_s for loss in losses)
        fault = min(_fault_unix_s(records, loss) for loss in losses)
    else:
        before_world = [record for record in records[since + 1 : until] if isinstance(record, PhaseEntered)]
        fencing = next((record for record in before_world if record.phase in _FIRST_PHASES), None)
        detected = fault = fencing.unix_s if fencing else records[min(until, len(records) - 1)].unix_s
    seconds = dict.fromkeys((*PHASES, "wait"), 0.0)
    seconds["detect"] = max(0.0, detected - fault)
    bucket, start = "fence", detected
    for phase in [p for p in phases if detected <= p.unix_s < end_unix_s]:
        seconds[bucket] += max(0.0, phase.unix_s - start)
        bucket, start = _next_bucket(bucket, phase.phase), max(start, phase.unix_s)
    seconds[bucket] += max(0.0, end_unix_s - start)
    compiling = min(compile_s, seconds["replay"])
    seconds["replay"] -= compiling
    seconds["rebuild"] += compiling
    return Span(fault_unix_s=fault, detected_unix_s=detected, end_unix_s=end_unix_s, seconds=seconds)


def _next_bucket(bucket: str, phase: str) -> str:
    if phase == "RUNNING":
        return "replay" if bucket in ("rebuild", "replay") else "fence"
    return _BUCKET_OF_PHASE.get(phase, bucket)


def _phases(records: Sequence[Record]) -> list[PhaseEntered]:
    return [record for record in records if isinstance(record, PhaseEntered)]
