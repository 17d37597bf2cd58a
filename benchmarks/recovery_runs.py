"""The runs of bench_recovery: one of ours with several losses, or one of a peer with one loss."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import ROOT, compile_cache_environment
from recovery_samples import JoinSample, LossSample, joins, losses

LOOP = Path(__file__).resolve().parent / "scripts" / "recovery_loop.py"
SLICES = 3
FIRST_STEP = 15
REJOIN_AFTER_STEPS = 10
AFTER_LAST_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class OursRun:
    """What one run of ours told; `error` says why it told nothing."""

    losses: tuple[LossSample, ...] = ()
    joins: tuple[JoinSample, ...] = ()
    error: str = ""


def fault_plan(rng: random.Random, signals: Sequence[str], spacing: int) -> tuple[list[str], int]:
    """One loss of a random slice each `spacing` steps or a little more, and the steps of the run."""
    faults, step = [], FIRST_STEP
    for kind in signals:
        step += rng.randrange(5)
        faults.append(f"{kind.lower()}:slice={rng.randrange(SLICES)}@step={step}")
        step += spacing
    return faults, step - spacing + AFTER_LAST_STEPS


def run_ours(directory: Path, faults: Sequence[str], steps: int, width: int, timeout_s: float) -> OursRun:
    """Train the peers' model under the engine, its defaults as they are, with these losses."""
    from elastic.records import read_history
    from elastic.report import read_report

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "elastic", "launch", "--slices", str(SLICES), "--devices-per-host", "1"]
    command += ["--rejoin-after-steps", str(REJOIN_AFTER_STEPS), "--out", str(directory)]
    # A slice that is lost again and again is kept away by default, which is not what is measured here.
    command += ["--quarantine-s", "0"]
    command += [word for fault in faults for word in ("--fault", fault)]
    command += ["--", str(LOOP), "--steps", str(steps), "--width", str(width)]
    environment = compile_cache_environment()
    with (directory / "launch.log").open("wb") as log:
        status = _run(command, environment, log, timeout_s)
    if status != 0:
        return OursRun(error=f"exit status {status}: {' '.join(command)}; see {directory / 'launch.log'}")
    records = list(read_history(directory / "events.jsonl"))
    recoveries = read_report(directory).recoveries
    return OursRun(losses=tuple(losses(records, recoveries, SLICES)), joins=tuple(joins(records, recoveries)))


def run_torchft(
    python: str, scripts: Path, *, heartbeat_s: float, kind: str, width: int, timeout_s: float
) -> dict[str, Any] | str:
    """One loss under torchft, and its rejoin after a kill; or why there is no figure."""
    command = [python, str(scripts / "recovery_torchft.py"), "--conf", "tight"]
    command += ["--heartbeat", str(heartbeat_s), "--signal", kind, "--width", str(width)]
    if kind == "KILL":
        command.append("--rejoin")
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")}
    with tempfile.TemporaryFile() as output:
        status = _run(command, environment, output, timeout_s)
        output.seek(0)
        told = output.read().decode(errors="replace").splitlines()
    if status != 0 or not told:
        return f"exit status {status}: {' '.join(told[-3:])}"
    figures: dict[str, Any] = json.loads(told[-1])
    return figures


def _run(command: Sequence[str], environment: dict[str, str], output: Any, timeout_s: float) -> int | None:
    """The exit status; None when it had to be ended. Ctrl-C first: both sides then end what they started."""
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    try:
        return child.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(timeout=15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
