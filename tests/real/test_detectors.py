"""A slice that hangs is found, named and survived; a script's own error is never taken for a lost slice."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_runs import assert_nothing_lost, left_behind
from small_scripts import STEPS, launch

from elastic.records import LossDetected, WorkerEvent, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "hang",
    ["while True: pass", "lock = threading.Lock(); lock.acquire(); lock.acquire()"],
    ids=["loop", "lock"],
)
@pytest.mark.family("hang")
def test_slice_that_hangs_in_a_step_is_ended_and_the_others_go_on(tmp_path: Path, hang: str) -> None:
    body = f"""
        if SLICE == "1" and not FLAG.exists():
            FLAG.touch()
            {hang}
    """
    run = launch(tmp_path, body, "--slices", "3", "--hang-after-s", "6", "--rejoin-after-steps", "3")
    assert_nothing_lost(run, steps=STEPS)
    (loss,) = of_kind(run.records, LossDetected)
    assert (loss.slice_index, loss.detector) == (1, "step-watchdog")
    assert "in the script, trouble (train.py:" in loss.cause
    assert "trouble (train.py:" in run.report.recoveries[0].cause
    stacks = (run.directory / "logs" / "worker-1.stacks").read_text()
    assert stacks.startswith("The main thread is in the script: trouble")
    assert 'train.py", line' in stacks
    overdue = {e.slice_index: e.detail for e in of_kind(run.records, WorkerEvent) if e.state == "overdue"}
    assert set(overdue) == {0, 1, 2}
    assert "waiting in" in overdue[0]
    assert left_behind(run.report.run.id) == []


def test_error_of_the_script_on_one_slice_ends_the_job_at_once_with_its_own_message(tmp_path: Path) -> None:
    run = launch(tmp_path, 'if SLICE == "1": raise KeyError("a bug of mine")', "--slices", "2")
    assert run.status == 1
    assert "on slice 1: KeyError: 'a bug of mine'" in run.report.run.error
    assert "KeyError: 'a bug of mine'" in run.output
    assert of_kind(run.records, LossDetected) == []
    assert run.report.recoveries == ()
    assert left_behind(run.report.run.id) == []


@pytest.mark.family("out of memory")
def test_devices_out_of_memory_are_no_lost_slice_and_end_the_job_after_a_second_try(tmp_path: Path) -> None:
    body = 'if SLICE == "1": jnp.zeros(1 << 44).block_until_ready()'
    run = launch(tmp_path, body, "--slices", "2")
    assert run.status == 1
    assert "the step after 5 failed twice on healthy slices: slice 1: the devices are out of memory" in (
        run.report.run.error
    )
    assert "RESOURCE_EXHAUSTED" in run.report.run.error
    assert of_kind(run.records, LossDetected) == []
    probes = [e for e in of_kind(run.records, WorkerEvent) if e.state == "probed"]
    assert {(e.slice_index, e.detail) for e in probes} == {(1, "its devices are well")}
    assert run.report.steps.committed == 6
