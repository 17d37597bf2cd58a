"""However a job ends, nothing is left behind; whatever the input, the error is one clear line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from real_runs import BOUND_S, finish, left_behind, processes_naming, start
from waiting import wait_until

from elastic.cli import main
from elastic.job import load_job
from snapshot.gc import collect

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ENDS_WITHIN_S = 5.0
"""What is promised: from Ctrl-C to the end, report written and memory removed."""

ENDLESS = ("--steps", "2000", "--fault", "none", "--slices", "2", "--rehearsals", "0")


def wait_until_history_has(directory: Path, text: str) -> None:
    history = directory / "events.jsonl"
    wait_until(
        lambda: history.exists() and text in history.read_text(),
        f"the history never had {text}",
        within_s=BOUND_S,
    )


def test_interrupt_while_training_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "demo", *ENDLESS, "--out", str(tmp_path))
    wait_until_history_has(tmp_path, '"StepCommitted"')
    process.send_signal(signal.SIGINT)
    run = finish(process, tmp_path, timeout_s=ENDS_WITHIN_S)
    assert run.status == 1
    assert "interrupted" in run.output
    assert run.report.run.outcome == "failed"
    assert left_behind(run.report.run.id) == []
    assert processes_naming(str(tmp_path)) == []


def test_interrupt_before_a_coordinator_decides_ends_as_soon_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "demo", *ENDLESS, "--out", str(tmp_path))
    wait_until(
        lambda: (tmp_path / "logs" / "agent-1.log").exists(), "the agents never started", within_s=BOUND_S
    )
    job_id = load_job(tmp_path).job_id
    process.send_signal(signal.SIGINT)
    run = finish(process, tmp_path, timeout_s=ENDS_WITHIN_S)
    assert run.status == 1
    assert "interrupted" in run.output
    assert left_behind(job_id) == []
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.slow
def test_kill_of_everything_is_cleaned_up_by_the_next_start_and_only_that(tmp_path: Path) -> None:
    dead, live = tmp_path / "dead", tmp_path / "live"
    first = start(dead, "demo", *ENDLESS, "--out", str(dead))
    wait_until_history_has(dead, '"StepCommitted"')
    dead_id = load_job(dead).job_id
    everything = [first.pid, *processes_naming(str(dead))]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none cleans up for another
        for pid in everything:
            os.kill(pid, number)
    assert finish(first, dead, timeout_s=ENDS_WITHIN_S).status == -signal.SIGKILL
    assert left_behind(dead_id)
    second = start(live, "demo", *ENDLESS, "--out", str(live))
    wait_until_history_has(live, '"StepCommitted"')
    assert left_behind(dead_id) == []
    collect()
    assert left_behind(load_job(live).job_id)
    second.send_signal(signal.SIGINT)
    assert finish(second, live, timeout_s=ENDS_WITHIN_S).status == 1


@pytest.mark.slow
def test_code_after_the_loop_runs_to_its_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    after = f"import time, pathlib; time.sleep(4); pathlib.Path({str(tmp_path)!r}, 'saved').write_text('yes')"
    script.write_text(_script(after=after))
    process = start(tmp_path, "launch", "--slices", "2", "--out", str(tmp_path / "run"), "--", str(script))
    run = finish(process, tmp_path / "run")
    assert run.status == 0, run.output
    assert (tmp_path / "saved").read_text() == "yes"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slices", "0"], "slices must be at least 1"),
        (["--fault", "kill:slice=7@step=3"], "there is no slice 7"),
        (["--fault", "melt:slice=1@step=3"], "no fault is called 'melt'"),
        (["--data", "/no/such/text"], "cannot read /no/such/text"),
        (["--shm-dir", "/no/such/memory"], "/no/such/memory is not a directory"),
        (["--min-slices", "4"], "min-slices must be between 1 and 3"),
        (["--persist-dir", "/no/such/disk/run"], "there is no directory /no/such/disk"),
        (["--snapshot-every", "soon"], "soon"),
        (["--bogus"], "No such option"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["elastic", "demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.strip().splitlines()) == 1


@pytest.mark.slow
def test_memory_too_small_for_the_snapshots_is_told_before_training(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(memory)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small tmpfs")
    try:
        out = tmp_path / "run"
        arguments = ["demo", "--fault", "none", "--shm-dir", str(memory), "--out", str(out)]
        run = finish(start(out, *arguments), out)
    finally:
        subprocess.run(["umount", str(memory)], check=True)
    assert run.status == 2
    assert "bytes available" in run.output
    assert run.report.steps.committed == 0


def _script(*, after: str) -> str:
    return textwrap.dedent(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        import elastic

        dataset = [{"x": np.float32(index)} for index in range(64)]
        with elastic.session() as session:
            for world in session.worlds():
                with world:
                    mesh = world.mesh({"data": -1})
                    state = world.restore(lambda: jnp.zeros(8), NamedSharding(mesh, P()))
                    update = jax.jit(lambda state, x: state + x.mean(), donate_argnums=0)
                    for step, batch in world.batches(dataset, global_batch=8, num_steps=12):
                        state = update(state, batch["x"])
                        world.commit(step, state)
        AFTER
        """
    ).replace("AFTER", after)


@pytest.mark.slow
def test_agent_that_starts_as_the_run_ends_does_not_hold_up_its_end(tmp_path: Path) -> None:
    """It attaches to a coordinator that is gone, has no worker and never hears that the job is over."""
    arguments = ["demo", "--steps", "60", "--out", str(tmp_path), "--rejoin-after-steps", "never"]
    faults = ["--fault", "kill:slice=2@step=10", "--fault", "agent:slice=2@step=58"]
    process = start(tmp_path, *arguments, *faults)
    run = finish(process, tmp_path, timeout_s=BOUND_S)
    assert run.status == 0
    assert run.report.run.outcome == "completed"
    assert left_behind(run.report.run.id) == []
    assert processes_naming(str(tmp_path)) == []
