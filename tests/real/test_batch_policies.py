"""Micro-batches, and a batch that goes with the number of slices, with real processes that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_runs import REPOSITORY, Run, finish, start

from elastic.records import StepCommitted, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = REPOSITORY / "examples" / "micro_batches.py"
STEPS, BATCH = 120, 96
FAULT = ("--fault", "kill:slice=1@step=24", "--rejoin-after-steps", "20", "--snapshot-every", "7")


def launch(directory: Path, script: Path, *arguments: str) -> Run:
    out = ("--devices-per-host", "1", "--out", str(directory))
    return finish(start(directory, "launch", *out, *arguments, "--", str(script)), directory)


def assert_held(run: Run) -> None:
    assert run.status == 0, run.output
    report = run.report
    assert (report.steps.committed, report.steps.lost, report.steps.repeated) == (STEPS, 0, 0)
    assert (report.samples.lost, report.samples.repeated) == (0, 0)
    assert set(report.invariants.values()) == {"held"}, report.invariants
    assert report.steps.replayed > 0
    assert report.samples.consumed == sum(len(ids) for ids in run.samples().values())


@pytest.mark.family("batch policies")
def test_micro_batches_give_the_losses_of_the_undisturbed_run(tmp_path: Path) -> None:
    undisturbed = launch(tmp_path / "one", EXAMPLE, "--fault", "none")
    run = launch(tmp_path / "two", EXAMPLE, *FAULT)
    assert_held(run)
    assert {len(ids) for ids in run.samples().values()} == {BATCH}
    assert run.samples() == undisturbed.samples()
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-3)


@pytest.mark.family("batch policies")
def test_slice_batch_runs_old_steps_again_as_they_were_and_new_ones_smaller(tmp_path: Path) -> None:
    script = tmp_path / "slice_batch.py"
    source = EXAMPLE.read_text()
    assert "global_batch=BATCH" in source
    script.write_text(source.replace("global_batch=BATCH", 'slice_batch=BATCH // 3, lr_rule="linear"'))
    run = launch(tmp_path / "run", script, *FAULT)
    assert_held(run)
    sizes = {record.step: len(record.sample_ids) for record in of_kind(run.records, StepCommitted)}
    (recovery, *_) = run.report.recoveries
    first_new = recovery.resumed_step
    assert [sizes[step] for step in range(first_new)] == [BATCH] * first_new
    assert sizes[first_new] == BATCH * 2 // 3
