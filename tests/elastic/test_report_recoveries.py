"""Recoveries: what led to them, how long each phase took, what the run lost by them."""

from dataclasses import replace

import histories
import pytest
from histories import STATE_BYTES, STEP_S, History

from elastic.records import RestoreChecked, StateRestored
from elastic.report import build_report
from elastic.report_schema import PHASES, PhaseTimes


def only_recovery(history):
    (recovery,) = build_report(history.records).recoveries
    return recovery


def phase_sum(recovery):
    return sum(getattr(recovery.phases_s, phase) for phase in PHASES)


def test_recovery_in_place_is_told_with_its_fault_and_its_phases():
    recovery = only_recovery(histories.killed_in_place())
    assert (recovery.mode, recovery.lost_slices, recovery.joined_slices) == ("in-place", (1,), ())
    assert (recovery.slices_after, recovery.generation) == ((0, 2), 2)
    assert (recovery.restored_step, recovery.resumed_step, recovery.replayed_steps) == (10, 11, 0)
    assert recovery.cause == "slice 1: killed by SIGKILL"
    assert recovery.mttd_s == pytest.approx(0.02)
    expected = PhaseTimes(detect=0.02, fence=0.05, plan=0.01, restore=0.1, rebuild=0.2 + 0.05, replay=STEP_S)
    for phase in PHASES:
        assert getattr(recovery.phases_s, phase) == pytest.approx(getattr(expected, phase)), phase
    assert recovery.mttr_s == pytest.approx(phase_sum(recovery))
    assert recovery.resumed_unix_s == pytest.approx(recovery.fault_unix_s + recovery.mttr_s)


def test_recovery_explains_itself():
    explanation = only_recovery(histories.killed_and_replayed()).explanation
    for words in (
        "Slice 1 was lost (killed by SIGKILL), noticed by process-exit.",
        "Slices 0 and 2 went on in place",
        "from the snapshot of step 8 (2.0 MB from the hosts' own shared memory)",
        "2 steps were replayed; step 11, the first new one, came",
    ):
        assert words in explanation


def test_recovery_ends_with_the_first_new_step_not_with_a_replayed_one():
    recovery = only_recovery(histories.killed_and_replayed())
    assert (recovery.resumed_step, recovery.replayed_steps) == (11, 2)
    assert recovery.phases_s.replay == pytest.approx(3 * STEP_S)


def test_recovery_reckons_from_the_last_sign_of_life_when_nobody_injected_the_fault():
    history = History().first().steps(1, 10).lose(1, injected=False)
    history.records[-1] = replace(history.records[-1], last_life_unix_s=history.now - 0.5)
    history.recover("in-place", 10, slices=(0, 2)).steps(11, 20).end()
    recovery = only_recovery(history)
    assert recovery.mttd_s == recovery.phases_s.detect == pytest.approx(0.5)


def test_recovery_does_not_blame_an_injected_fault_of_an_earlier_loss():
    history = histories.killed_and_rejoined()
    history.records.pop()
    history.lose(1, injected=False).recover("in-place", 20, slices=(0, 2)).steps(21, 25).end()
    assert build_report(history.records).recoveries[-1].mttd_s == pytest.approx(0.02)


def test_recovery_sums_the_source_tiers_of_its_slices():
    recovery = only_recovery(histories.killed_in_place())
    assert recovery.source_tiers == {"device": 0, "shm": 2 * STATE_BYTES, "peer": 0, "persistent": 0}


def test_scale_up_reckons_from_when_fencing_began():
    recovery = build_report(histories.killed_and_rejoined().records).recoveries[1]
    assert (recovery.mode, recovery.lost_slices, recovery.joined_slices) == ("scale-up", (), (1,))
    assert recovery.cause == "slice 1 joined"
    assert recovery.mttd_s == recovery.phases_s.detect == 0
    assert recovery.mttr_s == pytest.approx(0.05 + 0.01 + 0.1 + 0.2 + STEP_S)
    assert recovery.mttr_s == pytest.approx(phase_sum(recovery))
    assert recovery.bytes_moved == recovery.bytes_lower_bound == STATE_BYTES


def test_recovery_that_is_superseded_before_a_new_step_is_part_of_the_next():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 8, slices=(0, 2)).steps(9, 9).lose(0, cause="heartbeat too old")
    history.recover("respawn", 8, slices=(2,)).steps(9, 20).end()
    report = build_report(history.records)
    (recovery,) = report.recoveries
    assert recovery.cause == "slice 1: killed by SIGKILL; slice 0: heartbeat too old"
    assert (recovery.generation, recovery.mode, recovery.lost_slices) == (3, "respawn", (0, 1))
    assert (recovery.slices_after, recovery.replayed_steps) == ((2,), 2)
    assert recovery.mttr_s == pytest.approx(phase_sum(recovery))
    assert (report.steps.lost, report.steps.replayed, report.broken) == (0, 2, ())


def test_recovery_of_a_superseded_world_needs_no_check_of_its_restore():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 8, slices=(0, 2), check=False).lose(0)
    history.recover("respawn", 8, slices=(2,)).steps(9, 20).end()
    assert build_report(history.records).invariants["restored_equals_captured"] == "held"


def test_recovery_that_waits_counts_its_wait_apart():
    history = History().first().steps(1, 10).lose(1).phase("FENCING").phase("WAITING", 0.05).wait(3.0)
    history.recover("respawn", 10, slices=(0, 1, 2)).steps(11, 20).end()
    report = build_report(history.records)
    (recovery,) = report.recoveries
    assert report.badput_s.wait == pytest.approx(3.0)
    assert recovery.mttr_s == pytest.approx(phase_sum(recovery) + 3.0)


def test_recovery_after_the_last_step_resumed_with_its_last_replayed_one():
    history = History().first().steps(1, 20).lose(1)
    history.recover("in-place", 19, slices=(0, 2)).steps(20, 20).end()
    recovery = only_recovery(history)
    assert (recovery.resumed_step, recovery.replayed_steps) == (None, 1)
    assert recovery.mttr_s == pytest.approx(phase_sum(recovery))
    assert "no new step was left" in recovery.explanation


def test_recovery_that_a_failed_run_ends_in_has_no_mttr():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 10, slices=(0, 2)).wait(1.0).end("failed", error="it did not come back")
    recovery = only_recovery(history)
    assert recovery.mttr_s is recovery.resumed_unix_s is recovery.resumed_step is None
    assert phase_sum(recovery) == pytest.approx(1.38)
    assert "ended before a new step" in recovery.explanation


def test_goodput_is_the_share_of_training_time_that_is_no_badput():
    report = build_report(histories.killed_in_place().records)
    badput, recovery = report.badput_s, report.recoveries[0]
    stall_s = (10 + 9) * 0.003  # the first new step's is part of the recovery
    assert badput.snapshot_stall == pytest.approx(stall_s)
    lost_s = recovery.mttr_s + stall_s
    assert report.goodput == pytest.approx(1 - lost_s / report.run.wall_s)


def test_goodput_counts_a_loss_that_no_world_followed():
    history = History().first().steps(1, 10).lose(1).phase("FENCING").phase("WAITING", 0.05)
    report = build_report(history.wait(5.0).end("failed", error="below the minimum").records)
    assert report.recoveries == ()
    assert report.badput_s.wait == pytest.approx(5.0)
    assert (report.badput_s.detect, report.badput_s.fence) == pytest.approx((0.02, 0.05))
    assert report.goodput == pytest.approx(1 - (5.07 + 0.03) / report.run.wall_s)


@pytest.mark.parametrize(
    ("restored_digest", "verdict"), [("digest-10", "held"), ("other", "broken"), ("", "unknown")]
)
def test_restored_equals_captured_follows_the_digests(restored_digest, verdict):
    history = histories.killed_in_place()
    history.records = [
        replace(record, restored_digest=restored_digest) if isinstance(record, RestoreChecked) else record
        for record in history.records
    ]
    assert build_report(history.records).invariants["restored_equals_captured"] == verdict


def test_restored_equals_captured_is_unknown_without_a_check():
    records = [
        record for record in histories.killed_in_place().records if not isinstance(record, RestoreChecked)
    ]
    assert build_report(records).invariants["restored_equals_captured"] == "unknown"


def test_plan_minimal_is_broken_by_a_byte_above_the_lower_bound():
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 10, slices=(0, 2), bytes_moved=11, bytes_lower_bound=10).steps(11, 20).end()
    report = build_report(history.records)
    assert report.broken == ("plan_minimal",)
    assert "11 B moved where 10 B were needed" in report.recoveries[0].explanation


def test_recovery_without_restored_state_starts_fresh():
    history = History().first().lose(1)
    history.recover("respawn", None, slices=(0, 2)).steps(1, 20).end()
    report = build_report(history.records)
    assert report.recoveries[0].restored_step is None
    assert not any(isinstance(record, StateRestored) for record in history.records)
    assert (report.steps.committed, report.broken) == (20, ())


def test_recovery_without_a_loss_says_why_the_world_was_left_and_begins_with_the_suspicion():
    history = History().first().steps(1, 10).phase("SUSPECT", 0.03, "slice 2: a step failed").wait(1.0)
    history.recover("in-place", 10, slices=(0, 1, 2)).steps(11, 20).end()
    recovery = only_recovery(history)
    assert recovery.cause == "slice 2: a step failed"
    assert (recovery.mttd_s, recovery.lost_slices) == (0, ())
    assert recovery.phases_s.fence == pytest.approx(1.05)
    assert recovery.mttr_s == pytest.approx(phase_sum(recovery))
