"""A slice dies while real processes train: nothing is lost, and losses are those of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_runs import STEPS, Run, assert_nothing_lost, demo, left_behind, processes_naming

from elastic.records import StateRestored, StepCommitted, of_kind

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

REJOIN = ("--rejoin-after-steps", "3")
TOLERANCE = 1e-3


def test_killed_slice_costs_nothing_and_comes_back(tmp_path: Path) -> None:
    run = demo(tmp_path, *REJOIN, faults=["kill:slice=1@step=15"])
    assert_nothing_lost(run)
    loss, rejoin = run.report.recoveries
    assert loss.lost_slices == (1,)
    assert loss.slices_after == (0, 2)
    assert loss.mode in ("in-place", "respawn")
    assert loss.bytes_moved == loss.bytes_lower_bound == 0
    assert (rejoin.mode, rejoin.joined_slices, rejoin.slices_after) == ("scale-up", (1,), (0, 1, 2))
    assert rejoin.replayed_steps == 0
    assert rejoin.bytes_moved == rejoin.bytes_lower_bound > 0
    assert left_behind(run.report.run.id) == []
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.slow
def test_survivors_of_the_first_slice_take_the_smaller_program_from_the_compile_cache(
    tmp_path: Path, baseline: Run
) -> None:
    run = demo(tmp_path, *REJOIN, faults=["kill:slice=0@step=15"])
    assert_nothing_lost(run)
    assert run.report.recoveries[0].lost_slices == (0,)
    _assert_same_losses(run, baseline, bit_for_bit_before=run.report.recoveries[0].restored_step)
    generation = run.report.recoveries[0].generation
    first = _first_commits(run, generation)
    assert {record.slice_index for record in first} == {1, 2}
    assert all(record.cache_misses == 0 and record.cache_hits >= 1 for record in first)
    restored = [record for record in of_kind(run.records, StateRestored) if record.generation == generation]
    assert {record.slice_index for record in restored} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("cadence", ["4", "auto:5%"])
@pytest.mark.family("cadences")
def test_slices_capture_the_same_steps_at_any_cadence_and_a_loss_costs_none(
    tmp_path: Path, baseline: Run, cadence: str
) -> None:
    run = demo(tmp_path, *REJOIN, "--snapshot-every", cadence, faults=["kill:slice=1@step=15"])
    assert_nothing_lost(run)
    assert run.samples() == baseline.samples()
    taken: dict[int, dict[int, list[int]]] = {}
    for record in of_kind(run.records, StepCommitted):
        if record.captured_bytes:
            taken.setdefault(record.generation, {}).setdefault(record.slice_index, []).append(record.step)
    for of_slices in taken.values():
        longest = max(of_slices.values(), key=len)
        for steps in of_slices.values():  # who was killed stops earlier; who is told late misses the last
            assert steps[:-1] == longest[: len(steps) - 1]
    loss = run.report.recoveries[0]
    assert [world.cache_misses for world in _first_commits(run, loss.generation)] == [0, 0]


@pytest.mark.slow
@pytest.mark.family("one slice lost")
def test_last_slice_may_be_lost(tmp_path: Path, baseline: Run) -> None:
    run = demo(tmp_path, *REJOIN, faults=["kill:slice=2@step=15"])
    assert_nothing_lost(run)
    assert run.report.recoveries[0].lost_slices == (2,)
    assert run.samples() == baseline.samples()
    _assert_same_losses(run, baseline, bit_for_bit_before=run.report.recoveries[0].restored_step)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "term", "host"])
@pytest.mark.family("one slice lost")
def test_other_ways_to_lose_a_slice(tmp_path: Path, baseline: Run, kind: str) -> None:
    run = demo(tmp_path, *REJOIN, faults=[f"{kind}:slice=1@step=15"])
    assert_nothing_lost(run)
    assert run.report.recoveries[0].lost_slices == (1,)
    assert run.samples() == baseline.samples()
    if kind == "term":
        assert run.report.steps.replayed == 0


@pytest.mark.slow
@pytest.mark.family("agents")
def test_killed_agent_is_replaced_and_its_worker_adopted(tmp_path: Path, baseline: Run) -> None:
    run = demo(tmp_path, *REJOIN, faults=["agent:slice=1@step=15"])
    assert_nothing_lost(run)
    assert run.report.recoveries == ()
    assert run.losses() == baseline.losses()
    assert run.report.final.state_digest == baseline.report.final.state_digest


@pytest.mark.slow
@pytest.mark.parametrize("slices", ["0+1", "0+1+2"])
@pytest.mark.family("several slices lost")
def test_several_slices_at_once(tmp_path: Path, baseline: Run, slices: str) -> None:
    run = demo(tmp_path, *REJOIN, faults=[f"kill:slice={slices}@step=15"])
    assert_nothing_lost(run)
    assert run.samples() == baseline.samples()


@pytest.mark.slow
@pytest.mark.family("several slices lost")
def test_loss_while_the_first_step_compiles(tmp_path: Path) -> None:
    run = demo(tmp_path, *REJOIN, steps=30, faults=["kill:slice=2@step=0"])
    assert_nothing_lost(run, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["FENCING", "RESTORING", "REBUILDING", "REPLAYING"])
@pytest.mark.family("second loss")
def test_loss_during_the_recovery_of_another(tmp_path: Path, baseline: Run, phase: str) -> None:
    faults = ["kill:slice=1@step=15", f"kill:slice=2@phase={phase}"]
    run = demo(tmp_path, *REJOIN, faults=faults)
    assert_nothing_lost(run)
    assert run.samples() == baseline.samples()


@pytest.mark.slow
def test_job_below_its_minimum_waits_then_fails_and_says_why(tmp_path: Path) -> None:
    run = demo(
        tmp_path, "--min-slices", "3", "--wait-s", "3", "--rejoin-after-steps", "never",
        faults=["kill:slice=1@step=15"],
    )  # fmt: skip
    assert run.status == 1
    assert "2 of at least 3 slices" in run.output
    assert run.report.run.outcome == "failed"
    assert run.report.steps.lost == 0
    assert left_behind(run.report.run.id) == []


def _assert_same_losses(run: Run, baseline: Run, *, bit_for_bit_before: int | None) -> None:
    mine, theirs = run.losses(), baseline.losses()
    assert sorted(mine) == sorted(theirs) == list(range(STEPS))
    for step, loss in theirs.items():
        if bit_for_bit_before is not None and step <= bit_for_bit_before:
            assert mine[step] == loss, f"step {step} differs before the fault"
        assert mine[step] == pytest.approx(loss, rel=TOLERANCE)


def _first_commits(run: Run, generation: int) -> list[StepCommitted]:
    """Each slice's first commit in a world."""
    first = {
        record.slice_index: record
        for record in reversed(of_kind(run.records, StepCommitted))
        if record.generation == generation
    }
    return list(first.values())
