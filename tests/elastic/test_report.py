"""The report as a file, and its refusal of histories that tell nothing."""

import json
import subprocess
import sys

import histories
import pytest
from histories import STATE_BYTES, History

from elastic.history_text import describe_kept_out
from elastic.records import CoordinatorStarted, FaultMissed
from elastic.report import build_report, read_report, write_report
from reshard.errors import UsageError

SHAPE = {
    "run": "id adapter in_place simulated_faults slices seed started_unix_s wall_s outcome error"
    " hosts_per_slice",
    "steps": "target committed lost repeated replayed before nonfinite_losses first_nonfinite_loss "
    "is_loss_finite_again",
    "samples": "consumed lost repeated",
    "badput_s": "detect fence plan restore rebuild replay wait snapshot_stall",
    "final": "loss state_digest",
    "snapshots": "captured verified rejected bytes_per_host stall_s_p50 stall_s_p99 replicas "
    "persisted persist_failed persisted_step compared audits disagreements corruptions "
    "skipped interval_steps",
}
RECOVERY = (
    "generation cause lost_slices joined_slices slices_after mode fault_unix_s detected_unix_s "
    "resumed_unix_s mttd_s mttr_s phases_s restored_step resumed_step replayed_steps bytes_moved "
    "bytes_lower_bound source_tiers explanation"
)


def test_report_file_has_the_fields_of_schema_1(tmp_path):
    path = write_report(build_report(histories.killed_and_rejoined().records), tmp_path)
    written = json.loads(path.read_text())
    assert path == tmp_path / "report.json"
    assert set(written) == {
        *("schema", *SHAPE, "goodput", "recoveries", "invariants", "quarantines", "refused"),
        *("faults_missed", "takeovers", "stragglers"),
    }
    assert written["schema"] == 1
    for name, fields in SHAPE.items():
        assert list(written[name]) == fields.split(), name
    for recovery in written["recoveries"]:
        assert list(recovery) == RECOVERY.split()
        assert list(recovery["phases_s"]) == ["detect", "fence", "plan", "restore", "rebuild", "replay"]
        assert set(recovery["source_tiers"]) == {"device", "shm", "peer", "persistent"}
    assert set(written["invariants"].values()) <= {"held", "broken", "unknown"}


@pytest.mark.parametrize(
    "make",
    [histories.undisturbed, histories.killed_and_replayed, lambda: History(target=None)],
    ids=["undisturbed", "replayed", "only-started"],
)
def test_report_reads_back_as_it_was_written(tmp_path, make):
    report = build_report(make().records)
    write_report(report, tmp_path)
    assert read_report(tmp_path) == report
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no report to read"),
        ("{", "not a recovery report"),
        ("[]", "schema None"),
        ('{"schema": 2}', "reads schema 1"),
        ('{"schema": 1}', "not a recovery report"),
    ],
)
def test_report_that_cannot_be_read_is_refused_with_its_path(tmp_path, text, words):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_report(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_report_refuses_a_history_that_tells_nothing():
    with pytest.raises(UsageError, match="empty"):
        build_report([])
    with pytest.raises(UsageError, match="first record is missing"):
        build_report(History().steps(1, 2).records[1:])


def test_report_of_a_run_that_only_started_says_failed_and_claims_nothing():
    report = build_report(History().records)
    assert (report.run.outcome, report.goodput, report.steps.committed) == ("failed", 0.0, 0)
    assert report.invariants["no_step_lost"] == report.invariants["no_sample_repeated"] == "unknown"


def test_report_of_snapshots_counts_what_each_slice_took():
    report = build_report(histories.killed_in_place().records)
    snapshots = report.snapshots
    assert (snapshots.captured, snapshots.verified, snapshots.rejected) == (10 * 3 + 10 * 2, 2, 0)
    assert (snapshots.bytes_per_host, snapshots.replicas) == (STATE_BYTES, 3)
    assert (snapshots.stall_s_p50, snapshots.stall_s_p99) == (0.002, 0.003)


def test_report_takes_its_final_figures_from_the_last_effective_step():
    report = build_report(histories.undisturbed().records)
    assert report.final.loss == pytest.approx(5.0 / 24 + 0.5)
    assert report.final.state_digest == "d"


def test_report_imports_no_jax():
    program = "import sys, elastic.report; sys.exit('jax' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_fault_that_did_not_happen_is_in_the_report_and_is_said():
    missed = FaultMissed(
        unix_s=9e9, detail="kill:slice=1@step=900", why="the run ended before its moment came"
    )
    records = histories.killed_and_rejoined().records
    report = build_report([*records, missed])
    assert report.faults_missed == (missed,)
    assert report.run.wall_s == build_report(records).run.wall_s
    assert describe_kept_out(report) == [
        "Fault kill:slice=1@step=900 was not injected: the run ended before its moment came"
    ]


def test_takeovers_are_in_the_report_and_said_in_words():
    records = list(histories.killed_and_rejoined().records)
    middle = len(records) // 2
    first = CoordinatorStarted(unix_s=records[0].unix_s, epoch=1, pid=10)
    second = CoordinatorStarted(
        unix_s=records[middle - 1].unix_s + 0.25, epoch=2, pid=11, generation=3, phase="RUNNING", goes_on=True
    )
    report = build_report([*records[:1], first, *records[1:middle], second, *records[middle:]])
    (found,) = report.takeovers
    assert (found.epoch, found.phase, found.goes_on) == (2, "RUNNING", True)
    assert 0 <= found.away_s <= 0.25 + 1e-6
    (line,) = describe_kept_out(report)
    assert line.startswith("Another coordinator (epoch 2) took over in RUNNING after ")
    assert line.endswith("training went on as it was")
