"""State that does not divide over the slices that are left, with real processes that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from momentum_loop import HOLD_OPTIONS, write_script
from real_runs import Run, finish, left_behind, start

from elastic.records import WorldFormed, of_kind
from elastic.report_schema import Recovery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
STEPS_TO_REJOIN = 80


def train(
    directory: Path,
    *arguments: str,
    axes: str = '{"data": -1}',
    rows: str = 'P("data")',
    steps: int = STEPS,
    held_until_ready: int = 0,
    copied_before: int = -1,
) -> Run:
    """A job whose momentum has 4,096 rows, which divide over 4 and 2 slices, not over 3."""
    specs = f'{{"w": P(), "m": {rows}, "n": P()}}'  # momentum in parts, each on one slice
    script = write_script(
        directory, num_rows=4096, num_columns=12, axes=axes, specs=specs, steps=steps,
        held_until_ready=held_until_ready, num_slices_at_end=4 if held_until_ready else 0,
        copied_before=copied_before,
    )  # fmt: skip
    out = directory / "run"
    process = start(
        directory, "launch", "--devices-per-host", "1", "--replicas", "2", *HOLD_OPTIONS, *arguments,
        "--out", str(out), "--", str(script),
    )  # fmt: skip
    return finish(process, out)


def recoveries(run: Run, steps: int = STEPS) -> tuple[Recovery, ...]:
    """The recoveries of a run that lost nothing."""
    assert run.status == 0, run.output
    report = run.report
    assert (report.steps.committed, report.steps.lost, report.steps.repeated) == (steps, 0, 0)
    assert (report.samples.lost, report.samples.repeated) == (0, 0)
    assert "broken" not in report.invariants.values(), report.invariants
    for name in ("no_step_lost", "no_step_repeated", "restored_equals_captured", "plan_minimal"):
        assert report.invariants[name] == "held", report.invariants
    assert left_behind(report.run.id) == []
    return report.recoveries


def explanations(run: Run) -> list[str]:
    return [world.explanation for world in of_kind(run.records, WorldFormed)]


@pytest.mark.family("layouts")
def test_rows_that_do_not_divide_over_the_slices_left_cost_no_step(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--slices", "4", "--fault", "host:slice=1@step=15", "--rejoin-after-steps", "5",
        steps=STEPS_TO_REJOIN, held_until_ready=5, copied_before=12,
    )  # fmt: skip
    loss, joined = recoveries(run, STEPS_TO_REJOIN)
    assert (loss.slices_after, joined.slices_after) == ((0, 2, 3), (0, 1, 2, 3))
    assert "dim 0 (4,096) of ['m'] does not divide into 3: replicated over the axis" in loss.explanation
    assert "replicated" not in joined.explanation
    for recovery in (loss, joined):
        assert recovery.bytes_moved == recovery.bytes_lower_bound > 0


@pytest.mark.family("layouts")
def test_script_with_a_rule_of_its_own_gets_a_world_planned_for_it(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--slices", "4", "--fault", "kill:slice=1+2@step=15", "--rejoin-after-steps", "never",
        "--rehearsals", "0", rows='P("data") if len(world.slices) == 4 else P()',
    )  # fmt: skip
    (loss,) = recoveries(run)
    assert (loss.lost_slices, loss.slices_after) == ((1, 2), (0, 3))
    planned, again = explanations(run)[1:]
    assert "script" not in planned  # the rows do divide over two slices
    assert again.endswith("; the state is laid out as the script did it on 2 slices before")


@pytest.mark.family("layouts")
def test_rehearsal_shows_how_the_script_lays_out_the_state_on_fewer_slices(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--slices", "3", "--fault", "kill:slice=1@step=15", "--rejoin-after-steps", "never",
        rows='P(None, "data") if len(world.slices) == 3 else P()',
    )  # fmt: skip
    (loss,) = recoveries(run)
    assert loss.slices_after == (0, 2)
    assert "the state is laid out as the script did it on 2 slices before" in loss.explanation
    assert len(explanations(run)) == 3  # the rehearsal, the first world, the one after the loss


@pytest.mark.family("layouts")
def test_slice_that_the_mesh_cannot_take_is_idle_until_the_lost_one_is_back(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--slices", "4", "--fault", "kill:slice=3@step=15", "--rejoin-after-steps", "5",
        axes='{"data": -1, "expert": 2}', rows='P("expert")', steps=STEPS_TO_REJOIN,
        held_until_ready=5,
    )  # fmt: skip
    loss, joined = recoveries(run, STEPS_TO_REJOIN)
    assert (loss.lost_slices, loss.slices_after) == ((3,), (0, 1))
    assert "data=1 on 2 slices, slice 2 idle" in loss.explanation
    assert (joined.joined_slices, joined.slices_after) == ((2, 3), (0, 1, 2, 3))
