"""The local adapter as a person meets it: `elastic demo --adapter local`, and a plain script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {helpers!r})
from pathlib import Path
import elastic, local_jobs
from controller_adapter.local.faults import inject

def hook(world, step):
    if step == 3 and world.generation == 1:
        inject("kill", 0)
    if step == 6 and {fails}:
        raise ValueError("bad data")

local_jobs.train(elastic.session(seed=1), 8, hook)
print("done")
"""


def environment(devices: int = 6) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def elastic(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "elastic", *arguments]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def report_of(directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((directory / "report.json").read_bytes())
    return report


def left_of(report: dict[str, Any]) -> bool:
    return Path(f"/dev/shm/elastic-{report['run']['id']}").exists()


def run_script(tmp_path: Path, *, fails: bool) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(helpers=str(Path(__file__).parent), fails=fails))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    (directory,) = (tmp_path / "runs").iterdir()
    return done, report_of(directory)


@pytest.mark.real
def test_plain_script_survives_a_simulated_loss_and_cleans_up(tmp_path: Path) -> None:
    done, report = run_script(tmp_path, fails=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert report["run"]["outcome"] == "completed"
    assert set(report["invariants"].values()) == {"held"}
    assert [recovery["mode"] for recovery in report["recoveries"]] == ["in-place", "scale-up"]
    assert not left_of(report)


@pytest.mark.real
@pytest.mark.slow
def test_plain_script_that_fails_shows_its_own_error_and_cleans_up(tmp_path: Path) -> None:
    done, report = run_script(tmp_path, fails=True)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: bad data")
    assert "bad data" in report["run"]["error"]
    assert not left_of(report)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_demo_loses_a_slice_and_gets_it_back(tmp_path: Path) -> None:
    arguments = ["--steps", "30", "--fault", "kill:slice=1@step=10", "--rejoin-after-steps", "8"]
    demo = elastic("demo", "--adapter", "local", *arguments, "--out", str(tmp_path))
    output, _ = demo.communicate(timeout=150)
    assert demo.returncode == 0, output
    report = report_of(tmp_path)
    assert report["run"]["simulated_faults"] is True
    assert report["steps"]["committed"] == 30
    assert set(report["invariants"].values()) == {"held"}
    assert [recovery["mode"] for recovery in report["recoveries"]] == ["in-place", "scale-up"]
    assert report["recoveries"][0]["lost_slices"] == [1]
    assert not left_of(report)


@pytest.mark.real
@pytest.mark.timeout(120)
def test_interrupted_demo_ends_at_once_with_nothing_left(tmp_path: Path) -> None:
    demo = elastic("demo", "--adapter", "local", "--steps", "5000", "--fault", "none", "--out", str(tmp_path))
    history, deadline_s = tmp_path / "events.jsonl", time.monotonic() + 90
    while not (history.exists() and b'"StepCommitted"' in history.read_bytes()):
        assert time.monotonic() < deadline_s
        assert demo.poll() is None, demo.communicate()
        time.sleep(0.1)
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=5)
    assert demo.returncode == 1
    assert "interrupted (SIGINT)" in output
    assert not left_of(report_of(tmp_path))


@pytest.mark.real
@pytest.mark.slow
def test_demo_refuses_a_fault_that_has_no_meaning_here(tmp_path: Path) -> None:
    demo = elastic("demo", "--adapter", "local", "--fault", "agent:slice=1@step=3", "--out", str(tmp_path))
    output, _ = demo.communicate(timeout=30)
    assert demo.returncode == 2
    assert output.startswith(
        "elastic: the local adapter cannot simulate kill of agent=1: it has no such process"
    )
