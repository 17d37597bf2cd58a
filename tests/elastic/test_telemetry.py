"""The metrics that the contracts name, read as an exporter reads them, and told by the history alone."""

from __future__ import annotations

from typing import Any

import histories
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from straggler_records import formed

from elastic.records import (
    FaultInjected,
    LossDetected,
    PhaseEntered,
    Record,
    RunEnded,
    RunStarted,
    StateRestored,
    StepCommitted,
    StragglerOver,
    StragglerSeen,
    WorkerEvent,
    of_kind,
)
from elastic.report import build_report
from elastic.telemetry import SECONDS, RecoveryTracer

NAMES = {
    "elastic.recovery.duration",
    "elastic.detect.duration",
    "elastic.recoveries",
    "elastic.steps",
    "elastic.slices",
    "elastic.generation",
    "elastic.snapshot.stall",
    "elastic.snapshot.bytes",
    "elastic.reshard.bytes",
    "elastic.goodput",
}
SECONDS_OF = {name for name in NAMES if name.endswith((".duration", ".stall"))}


def read(monkeypatch: pytest.MonkeyPatch, records: list[Record]) -> dict[str, Any]:
    """Each metric by name, after these records."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    tracer = RecoveryTracer()
    for record in records:
        tracer.hear(record)
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    found = [
        m for resource in data.resource_metrics for scope in resource.scope_metrics for m in scope.metrics
    ]
    return {metric.name: metric for metric in found}


def by(metric: Any, attribute: str) -> dict[Any, float]:
    return {point.attributes[attribute]: point.value for point in metric.data.data_points}


def test_a_run_with_a_loss_tells_every_metric_of_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(monkeypatch, histories.killed_and_rejoined().records)
    assert set(found) >= NAMES
    assert all(metric.description for metric in found.values())
    for name in SECONDS_OF:
        assert found[name].unit == "s"
        assert all(point.explicit_bounds == SECONDS for point in found[name].data.data_points)


def test_detection_is_measured_from_the_fault_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = LossDetected(
        unix_s=12.0,
        generation=1,
        slice_index=1,
        cause="killed",
        detector="process-exit",
        last_life_unix_s=11.9,
    )
    fault = FaultInjected(unix_s=11.5, fault="kill", slice_index=1)
    for records, expected_s in (([loss], 0.1), ([fault, loss], 0.5)):
        (point,) = read(monkeypatch, records)["elastic.detect.duration"].data.data_points
        assert point.sum == pytest.approx(expected_s)
        assert point.attributes == {"detector": "process-exit"}


def test_steps_that_run_again_are_replayed_and_not_committed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    history = histories.killed_and_replayed()
    report = build_report(history.records)
    told = by(read(monkeypatch, history.records)["elastic.steps"], "kind")
    assert told == {"committed": report.steps.committed, "replayed": report.steps.replayed}
    assert report.steps.replayed > 0


def test_committed_steps_that_no_memory_has_at_the_end_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = RunEnded(
        unix_s=1.0,
        generation=1,
        outcome="failed",
        error="x",
        final_step=9,
        state_digest="",
        restorable_step=6,
    )
    assert by(read(monkeypatch, [ended])["elastic.steps"], "kind") == {"lost": 3}


def test_bytes_of_restores_are_told_by_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    history = histories.killed_and_rejoined()
    expected: dict[str, int] = {}
    for record in of_kind(history.records, StateRestored):
        for tier, num_bytes in record.bytes_from.items():
            expected[tier] = expected.get(tier, 0) + num_bytes
    assert by(read(monkeypatch, history.records)["elastic.reshard.bytes"], "tier") == expected


def test_slices_are_told_by_what_their_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    started = histories.undisturbed().records[0]
    assert isinstance(started, RunStarted)

    def worker(slice_index: int, state: str) -> WorkerEvent:
        return WorkerEvent(unix_s=1001.0, generation=1, slice_index=slice_index, state=state)

    records: list[Record] = [started, *(worker(index, "started") for index in range(3))]
    states = ("training", "ready", "starting", "away")

    def told() -> tuple[float, ...]:
        counts = by(read(monkeypatch, records)["elastic.slices"], "state")
        return tuple(counts[state] for state in states)

    assert told() == (0, 0, 3, 0)
    records += [worker(index, "ready") for index in range(3)]
    assert told() == (0, 3, 0, 0)
    records.append(formed(1, (0, 1, 2)))
    assert told() == (3, 0, 0, 0)
    records.append(worker(1, "ended"))
    assert told() == (2, 0, 0, 1)
    records.append(formed(2, (0, 2)))
    assert told() == (2, 0, 0, 1)


def test_goodput_is_the_part_of_the_time_that_made_new_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(phase: str, unix_s: float) -> PhaseEntered:
        return PhaseEntered(unix_s=unix_s, generation=1, phase=phase)

    records: list[Record] = [entered("REBUILDING", 80.0), entered("RUNNING", 100.0)]
    records += [entered("FENCING", 106.0), entered("REPLAYING", 107.0), entered("RUNNING", 108.0)]
    records.append(entered("COMPLETED", 110.0))
    (point,) = read(monkeypatch, records)["elastic.goodput"].data.data_points
    assert point.value == pytest.approx(0.8)


def test_goodput_takes_off_what_captures_held_up_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    history = histories.undisturbed()
    commits = of_kind(history.records, StepCommitted)
    (point,) = read(monkeypatch, history.records)["elastic.goodput"].data.data_points
    stall_s = sum({(c.generation, c.step): c.stall_s for c in commits}.values())
    assert stall_s > 0
    assert 1 - 2 * stall_s < point.value < 1


def test_a_straggler_is_told_by_its_factor_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = StragglerSeen(
        unix_s=1.0, generation=1, slice_index=2, step=40, where="input", factor=4.0, own_s=0.04, others_s=0.01
    )
    over = StragglerOver(unix_s=2.0, generation=1, slice_index=2, step=90, where="input")
    for records, value in (([seen], 4.0), ([seen, over], 0.0)):
        (point,) = read(monkeypatch, records)["elastic.stragglers"].data.data_points
        assert (point.value, dict(point.attributes)) == (value, {"slice": 2, "where": "input"})
