"""All refusals are counted, and what is written of them does not grow with their number."""

from __future__ import annotations

import histories
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from elastic import telemetry
from elastic.history_text import describe_kept_out
from elastic.records import MessageRefused, SliceQuarantined
from elastic.refusals import WRITTEN_SINGLY, RefusalLedger, RefusalsTold, RefusalTally
from elastic.report import build_report
from elastic.report_html import render_html
from reshard.errors import UsageError


def refused(num: int = 1, *, surface: str = "control", cause: str = "wrong-token") -> MessageRefused:
    return MessageRefused(
        unix_s=0.0, generation=1, sender="x" * 1000, reason="no", surface=surface, cause=cause, num=num
    )


@given(st.lists(st.integers(1, 1000), max_size=200))
def test_records_add_up_to_all_refusals_and_few_are_written(numbers: list[int]) -> None:
    ledger = RefusalLedger()
    written = [record for num in numbers if (record := ledger.take(refused(num))) is not None]
    bound = WRITTEN_SINGLY + sum(numbers).bit_length()
    assert len(written) <= bound
    written += ledger.rest()
    assert sum(record.num for record in written) == sum(numbers)
    assert ledger.counts() == ({"control": {"wrong-token": sum(numbers)}} if numbers else {})
    assert all(len(record.sender) == 120 for record in written)
    assert list(ledger.rest()) == []


def test_many_refusals_leave_few_records() -> None:
    ledger = RefusalLedger()
    written = [ledger.take(refused()) for _ in range(20_000)]
    numbers = [record.num for record in written if record is not None]
    assert numbers[: WRITTEN_SINGLY + 3] == [1] * WRITTEN_SINGLY + [8, 16, 32]
    assert len(numbers) == WRITTEN_SINGLY + 11


def test_kinds_are_counted_apart() -> None:
    ledger = RefusalLedger()
    for surface, cause in (("control", "wrong-token"), ("data-plane", "wrong-token"), ("control", "other")):
        assert ledger.take(refused(surface=surface, cause=cause)) is not None
    assert ledger.counts() == {"control": {"other": 1, "wrong-token": 1}, "data-plane": {"wrong-token": 1}}


def test_tally_tells_once_what_an_agent_has_refused() -> None:
    tally = RefusalTally()
    for sender in ("a", "b"):
        tally.count("data-plane", "wrong-token", sender)
    assert tally.take() == (RefusalsTold(surface="data-plane", reason="wrong-token", sender="b", num=2),)
    assert tally.take() == ()
    with pytest.raises(UsageError, match="at least one"):
        RefusalsTold(surface="control", reason="x", sender="y", num=0)


def test_metric_counts_refusals_by_surface_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(telemetry.metrics, "get_meter", provider.get_meter)
    tracer = telemetry.RecoveryTracer()
    for record in (refused(3), refused(2), refused(surface="data-plane", cause="too-slow")):
        tracer.hear(record)
    data = reader.get_metrics_data()
    assert data is not None
    (metric,) = [
        metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "elastic.refused"
    ]
    counted = {
        tuple(sorted(dict(point.attributes or {}).items())): point.value for point in metric.data.data_points
    }
    assert counted == {
        (("reason", "wrong-token"), ("surface", "control")): 5,
        (("reason", "too-slow"), ("surface", "data-plane")): 1,
    }
    provider.shutdown()


def test_report_counts_what_the_records_stand_for_and_says_it() -> None:
    records = list(histories.killed_and_rejoined().records)
    quarantined = SliceQuarantined(
        unix_s=records[-1].unix_s, generation=2, slice_index=1, losses_in_row=2, healthy_s=1.0, delay_s=5.0,
        cause="killed",
    )  # fmt: skip
    report = build_report([*records[:-1], refused(3), refused(2), quarantined, records[-1]])
    assert report.refused == {"control": {"wrong-token": 5}}
    assert report.quarantines == (quarantined,)
    assert describe_kept_out(report) == [
        "Slice 1 is in quarantine for 5.00 s: "
        "lost 2 times in a row, last 1.00 s after it had joined (killed)",
        "Refused: 5 at control (wrong-token)",
    ]
    assert "Refused: 5 at control (wrong-token)" in render_html(report, records)
    assert describe_kept_out(build_report(records)) == []
