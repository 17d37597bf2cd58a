"""What the report, the events and the live view tell of copies that differ."""

from __future__ import annotations

import histories
import pytest
from histories import History
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from elastic.display_state import JobView
from elastic.history_copies import MAX_CORRUPTIONS
from elastic.history_text import describe
from elastic.records import (
    CopiesCompared,
    CorruptionSuspected,
    SuspectBox,
    decode_record,
    encode_record,
    of_kind,
)
from elastic.report import build_report, read_report, write_report
from elastic.telemetry import RecoveryTracer


def test_report_lists_an_array_once_with_its_first_step_and_what_the_majority_found(tmp_path):
    report = build_report(histories.corrupted().records)
    snapshots = report.snapshots
    assert (snapshots.compared, snapshots.audits, snapshots.disagreements) == (1, 1, 2)
    (found,) = snapshots.corruptions
    assert (found.first_step, found.path, found.suspects, found.devices) == (6, "['w']", (1,), (2,))
    assert found.is_majority
    assert report.broken == ("copies_agree",)
    write_report(report, tmp_path)
    assert read_report(tmp_path) == report


def test_report_holds_copies_to_agree_only_where_some_were_compared():
    assert build_report(histories.undisturbed().records).invariants["copies_agree"] == "held"
    records = [r for r in histories.undisturbed().records if not isinstance(r, CopiesCompared)]
    assert build_report(records).invariants["copies_agree"] == "unknown"


@pytest.mark.parametrize(("restored", "verdict"), [(5, "held"), (6, "broken"), (8, "broken")])
def test_copies_agree_again_once_the_job_has_gone_back_behind_what_differed(restored, verdict):
    """They differ from step 6 on in `corrupted`; a later world starts from before, or not."""
    records = histories.corrupted().records
    found = next(place for place, record in enumerate(records) if getattr(record, "step", 0) == 9)
    history = History()
    history.records, history.newest, history.generation = list(records[:found]), 8, 1
    history.lose(1).recover("in-place", restored, slices=(0, 2)).steps(restored + 1, 20).end()
    report = build_report(history.records)
    assert report.invariants["copies_agree"] == verdict
    assert report.snapshots.disagreements == 2


def test_report_lists_a_bounded_number_of_arrays_those_of_a_majority_first():
    history = History().first().steps(1, 3)
    for number in range(2 * MAX_CORRUPTIONS):
        box = SuspectBox(path=f"w{number}", box=(), slices=(0, 1, 2), suspects=(2,), is_majority=number == 11)
        history.add(
            CorruptionSuspected(
                unix_s=history.now,
                generation=1,
                step=3,
                is_audit=False,
                num_arrays=1,
                num_boxes=1,
                slices=(0, 1, 2),
                suspects=(2,),
                is_majority=number == 11,
                boxes=(box,),
            )
        )
    corruptions = build_report(history.end().records).snapshots.corruptions
    assert len(corruptions) == MAX_CORRUPTIONS
    assert corruptions[0].path == "w11"


def test_events_tell_step_array_and_slice():
    history = histories.corrupted()
    two, three = of_kind(history.records, CorruptionSuspected)
    where = "SILENT CORRUPTION: copies of 1 array of step"
    assert describe(two) == f"{where} 6 differ: ['w'] [0:8, 0:2] on one of slices 0 and 1"
    assert (
        describe(three) == f"{where} 8 differ (audit): ['w'] [0:8, 0:2] is wrong on slice 1 (mesh device 2)"
    )
    assert [describe(record) for record in of_kind(history.records, CopiesCompared)] == [
        "copies of 1 capture compared across slices",
        "audit: every copy on the devices compared",
    ]
    assert decode_record(encode_record(three)) == three


def test_live_view_shows_the_newest_finding():
    view = JobView()
    for record in histories.corrupted().records:
        view.feed(record)
    assert "is wrong on slice 1" in view.corruption


def points_of(monkeypatch, history, name):
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    tracer = RecoveryTracer()
    for record in history.records:
        tracer.hear(record)
    data = reader.get_metrics_data()
    provider.shutdown()
    return [
        point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]


def test_disagreements_are_counted_by_what_found_them(monkeypatch):
    points = points_of(monkeypatch, histories.corrupted(), "elastic.snapshot.disagreements")
    assert {point.attributes["found_by"]: point.value for point in points} == {"capture": 1, "audit": 1}


def test_captures_are_measured_by_slice(monkeypatch):
    history = histories.undisturbed()
    commits = [record for record in history.records if getattr(record, "captured_bytes", 0)]
    for points, of in (
        (points_of(monkeypatch, history, "elastic.snapshot.bytes"), "value"),
        (points_of(monkeypatch, history, "elastic.snapshot.stall"), "count"),
    ):
        told = {point.attributes["slice"]: getattr(point, of) for point in points}
        expected = {}
        for record in commits:
            amount = record.captured_bytes if of == "value" else 1
            expected[record.slice_index] = expected.get(record.slice_index, 0) + amount
        assert told == expected != {}
