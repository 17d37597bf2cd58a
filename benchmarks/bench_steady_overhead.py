"""What does a steady step cost under the engine, a snapshot at every step included, over the bare loop?

Launches a job as users do (`elastic launch`, 3 slices of 2 devices, processes of their own) whose script
runs bare steps and wrapped ones in turn: see scripts/steady_overhead_loop.py. A bare step is one of a
careful loop without the engine: make the batch, step, wait for the loss. Blocks of them alternate in the
same processes, on the same state, with the same jitted step; the overhead is the median over all pairs of
blocks. The engine's other processes (agents, coordinator) live during the bare steps too: what they then
need is told as their CPU time.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from demo_jobs import exit_on_sigterm
from machine import ROOT, RUNS, compile_cache_environment, fail, hand_over, is_quiet, load1, parser
from steady_figures import Steady, steady_figures

TARGET = 0.03
SCRIPT = Path(__file__).parent / "scripts" / "steady_overhead_loop.py"
SLICES = 3


def options() -> Namespace:
    made = parser(__doc__ or "", "steady_overhead.json")
    made.add_argument(
        "--pairs",
        type=int,
        default=None,
        help="rounds of bare, wrapped and floor blocks (default 18; smoke 2)",
    )
    made.add_argument(
        "--steps", type=int, default=None, help="counted steps of a block (default 10; smoke 3)"
    )
    made.add_argument(
        "--out",
        type=Path,
        default=RUNS / "steady_overhead",
        help="directory of the job (default: %(default)s)",
    )
    made.add_argument(
        "--timeout-s", type=float, default=600, help="give up after so long (default: %(default)s)"
    )
    made.add_argument("--again", action="store_true", help="print the figures of the last job, run none")
    given = made.parse_args()
    given.pairs = given.pairs or (2 if given.smoke else 18)
    given.steps = given.steps or (3 if given.smoke else 10)
    return given


def run_job(given: Namespace) -> None:
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    command = [sys.executable, "-m", "elastic", "launch", "--slices", str(SLICES), "--devices-per-host", "2"]
    command += ["--rehearsals", "0", "--rejoin-after-steps", "never", "--out", str(given.out), "--"]
    command += [
        str(SCRIPT),
        "--rounds",
        str(given.pairs),
        "--block",
        str(given.steps),
        "--into",
        str(given.out),
    ]
    log_path = given.out / "launch.log"
    with log_path.open("wb") as log:
        job = subprocess.Popen(command, cwd=ROOT, env=compile_cache_environment(), stdout=log, stderr=log)
        try:
            status = job.wait(timeout=given.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if job.poll() is None:
                job.terminate()  # the launcher ends all that it started
                job.wait()
    if status != 0:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
        fail(f"the job {'did not end in time' if status is None else f'ended with status {status}'}\n{tail}")


def read_job(directory: Path) -> tuple[list[dict[str, Any]], dict[int, float], int]:
    """What the processes measured; from the history the stall of each step, and the bytes of a capture."""
    from elastic.records import StepCommitted, WorldFormed, of_kind, read_history

    records = list(read_history(directory / "events.jsonl"))
    worlds = of_kind(records, WorldFormed)
    if len(worlds) != 1:
        fail(f"{len(worlds)} worlds were formed: these are not the figures of one undisturbed world")
    commits = of_kind(records, StepCommitted)
    stall_s: dict[int, float] = {}
    for commit in commits:
        stall_s[commit.step] = max(stall_s.get(commit.step, 0.0), commit.stall_s)
    measured = [json.loads(path.read_text()) for path in sorted(directory.glob("measured-*.json"))]
    if len(measured) != SLICES:
        fail(f"{len(measured)} of {SLICES} processes wrote down what they measured")
    return measured, stall_s, max(commit.captured_bytes for commit in commits)


def show(result: Steady, verdict: str, captured_bytes: int, floor_bytes: int) -> None:
    step, part = result.step_ms, result.parts_ms
    print(
        f"bound    0.00 %  the bare loop, {step['bare']:.2f} ms a step;"
        f" two bare blocks in a row differ by {result.noise:.2%}"
    )
    print(
        f"floor    {_range(result.floor)}  copy and hash of a snapshot's bytes, {floor_bytes / 1e6:.1f} MB"
        f" ({part['copy_and_hash']:.2f} ms)"
    )
    print(f"target  <={TARGET:.2%}")
    print(
        f"engine   {_range(result.overhead)}  {step['wrapped']:.2f} ms a step,"
        f" median of {len(result.pairs)} pairs: {verdict}"
    )
    print(f"typical  {_range(result.typical)}  the same of each block's median step: without its stragglers")
    print(f"CPU      {_range(result.cpu)}  the same of the workers' CPU time, which load disturbs less")
    print(f"parts    {result.by_parts:6.2%}  the engine's batch and commit less a bare batch, as below")
    if captured_bytes != floor_bytes:
        print(f"note: the engine captures {captured_bytes} bytes, the floor copies {floor_bytes}")
    print("\nwhere a step's time goes, ms (medians)            bare   engine")
    rows = [
        ("batch", part["bare_batch"], part["wrapped_batch"]),
        ("  drawing sample ids", None, part["sample_ids"]),
        ("  reading rows, placing them", None, part["make_batch"]),
        ("  journal, checks", None, part["journal_and_checks"]),
        ("dispatch of the step", part["bare_dispatch"], part["wrapped_dispatch"]),
        ("wait for the loss", part["bare_wait"], part["wrapped_wait"]),
        ("commit", None, part["wrapped_commit"]),
        ("  capture (stall_s, slowest slice)", None, part["capture"]),
        ("  the rest", None, part["commit_rest"]),
        ("CPU of the 3 workers, mean", result.cpu_ms["bare"], result.cpu_ms["wrapped"]),
        *(
            (f"CPU of {role}", bare, result.engine_cpu_ms["wrapped"][role])
            for role, bare in result.engine_cpu_ms["bare"].items()
        ),
    ]
    for name, bare, engine in rows:
        print(f"  {name:<42}{'' if bare is None else f'{bare:.2f}':>10}{engine:>9.2f}")
    background = sum(result.engine_cpu_ms["bare"].values())
    if background:
        print(
            f"  (bare steps bear the engine's background:"
            f" {background / result.cpu_ms['bare']:.1%} of the workers' CPU)"
        )
    print()


def _range(interval: Any) -> str:
    return f"{interval.median:6.2%} [{interval.low:.2%}, {interval.high:.2%}]"


def main() -> None:
    given = options()
    exit_on_sigterm()
    load_before = load1()
    if given.again:
        print(f"steady overhead, figures of the job in {given.out}")
    else:
        print(
            f"steady overhead: {SLICES} slices x 2 devices,"
            f" {given.pairs} rounds of {given.steps} bare, wrapped and floor steps (load {load_before})",
            flush=True,
        )
        run_job(given)
    measured, stall_s, captured_bytes = read_job(given.out)
    result = steady_figures(measured, stall_s)
    verdict = "pass" if result.overhead.median <= TARGET else "miss"
    is_clear = not result.overhead.spans(TARGET)
    floor_bytes = int(measured[0]["floor_bytes"])
    show(
        result,
        verdict if is_clear else f"{verdict}, but the interval spans the target",
        captured_bytes,
        floor_bytes,
    )
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        "overhead": round(result.overhead.median, 5),
        "overhead_interval": [round(result.overhead.low, 5), round(result.overhead.high, 5)],
        "overhead_typical": round(result.typical.median, 5),
        "overhead_cpu": round(result.cpu.median, 5),
        "overhead_by_parts": round(result.by_parts, 5),
        "floor": round(result.floor.median, 5),
        "x_floor": round((1 + result.overhead.median) / (1 + result.floor.median), 5),
        "target": TARGET,
        "verdict": verdict,
        "is_clear": is_clear,
        "noise": round(result.noise, 5),
        "pairs": [round(pair, 5) for pair in result.pairs],
        "pairs_below_target": round(statistics.fmean(pair <= TARGET for pair in result.pairs), 3),
        "block_steps": given.steps,
        "captured_bytes": captured_bytes,
        "step_ms": _rounded(result.step_ms),
        "parts_ms": _rounded(result.parts_ms),
        "worker_cpu_ms": _rounded(result.cpu_ms),
        "engine_cpu_ms": {kind: _rounded(roles) for kind, roles in result.engine_cpu_ms.items()},
    }
    hand_over("steady_overhead", figures, given.json, smoke=given.smoke, load_before=load_before)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


if __name__ == "__main__":
    main()
