"""A user's bug, a NaN or too little memory is no lost slice: the job ends, and says which of them it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import Run, assert_nothing_lost, left_behind
from small_scripts import STEPS, launch

from elastic.records import LossDetected, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

TWO = ("--slices", "2", "--rehearsals", "0")
LIMIT_BYTES = 700 << 20
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


def assert_stopped(run: Run, said: str) -> None:
    """The run failed with this message, on one line of standard error, and left nothing behind."""
    assert run.status == 1, run.output
    assert said in run.report.run.error
    (line,) = [line for line in run.output.splitlines() if line.startswith("elastic: ")]
    assert said in line
    assert run.report.steps.committed == 6
    assert run.report.steps.lost == 0
    assert left_behind(run.report.run.id) == []


@pytest.mark.family("not finite")
def test_nan_that_jax_debug_nans_finds_ends_the_job_with_its_message(tmp_path: Path) -> None:
    prepare = 'jax.config.update("jax_debug_nans", True)'
    run = launch(tmp_path, "jnp.log(jnp.float32(-1.0))", *TWO, prepare=prepare)
    assert_stopped(run, "FloatingPointError: invalid value (nan) encountered in")
    assert of_kind(run.records, LossDetected) == []


@pytest.mark.family("not finite")
def test_loss_that_is_nan_is_told_with_its_first_step_and_training_goes_on(tmp_path: Path) -> None:
    run = launch(tmp_path, "pass", *TWO, loss="jnp.where(step < 6, 1.0, jnp.nan)")
    assert_nothing_lost(run, steps=STEPS)
    steps = run.report.steps
    assert (steps.first_nonfinite_loss, steps.nonfinite_losses) == (6, STEPS - 6)
    assert "Loss is not finite since step 6" in run.output


@pytest.mark.family("out of memory")
def test_array_too_large_for_the_host_ends_the_job_as_out_of_memory(tmp_path: Path) -> None:
    run = launch(tmp_path, 'if SLICE == "1": np.ones(1 << 50)', *TWO)
    assert_stopped(run, "on slice 1: the host is out of memory: MemoryError: Unable to allocate")
    assert of_kind(run.records, LossDetected) == []


@pytest.mark.family("killed at a step")
def test_worker_killed_at_the_same_step_in_each_world_ends_the_job_and_names_the_step(tmp_path: Path) -> None:
    body = """
        if int(SLICE) == world.slices[0]:
            os.kill(os.getpid(), 9)
    """
    run = launch(tmp_path, body, *TWO)
    assert_stopped(run, "killed at step 6 3 times in a row (exit by SIGKILL; slices 0, ")
    assert "out of memory? No control group of the workers counts a kill" in run.report.run.error


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A control group with a memory limit, that workers may move into."""
    made = MEMORY_GROUPS / f"elastic-test-{tmp_path.name}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"no control group can be limited here: {error}")
    yield made
    made.rmdir()


@pytest.mark.family("killed at a step")
def test_worker_that_the_kernel_kills_for_want_of_memory_is_told_as_that(tmp_path: Path, group: Path) -> None:
    prepare = f"""
        if SLICE == "0":
            pathlib.Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
    """
    body = f'if SLICE == "0": np.ones({LIMIT_BYTES}, np.uint8)'
    run = launch(tmp_path, body, *TWO, "--min-slices", "2", prepare=prepare)
    assert_stopped(
        run, "killed at step 6 2 times in a row (exit by SIGKILL; slices 0, 0): out of memory, the kernel"
    )
    assert f"for want of memory in control group {group.name} (its limit is 734.0 MB)" in run.report.run.error
    losses = of_kind(run.records, LossDetected)
    assert all("the worker was killed by SIGKILL (the kernel killed" in loss.cause for loss in losses)
