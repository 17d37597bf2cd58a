"""From SIGKILL of a slice to the end of the next new step: how long, beside torchft in the same run?

The peers' model (10.5 M parameters, Adam, 126 MB of state), three processes. Blocks are interleaved: one run
of ours with several kills and a SIGSTOP, each after the slice lost before is back, then torchft with its
heartbeat at 0.5 s and at 0.2 s (one loss a run). Ours has its default settings, but that a slice lost often
is not kept away. No recovery can be shorter than one step: it ends with the first new one, so what it took
beyond one step of its own run is what is bounded. Without torchft's Python it is left out, and said so.
"""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

from demo_jobs import exit_on_sigterm
from machine import RUNS, fail, hand_over, is_quiet, load1, parser
from recovery_runs import fault_plan, run_ours, run_torchft
from recovery_samples import (
    JoinSample,
    LossSample,
    summarise_joins,
    summarise_losses,
    summarise_peer,
    verdicts,
)

HEARTBEATS_S = (0.5, 0.2)
BLOCKS = 6
KILLS_A_RUN = 6


def options() -> Namespace:
    made = parser(__doc__ or "", "recovery.json")
    made.add_argument("--blocks", type=int, help=f"interleaved blocks (default {BLOCKS}; smoke 1)")
    made.add_argument("--kills", type=int, help=f"kills in each (default {KILLS_A_RUN}; smoke 1)")
    made.add_argument("--stops", type=int, help="SIGSTOPs in each (default 1; smoke 0)")
    made.add_argument("--spacing", type=int, help="steps from one loss to the next (default 80; smoke 30)")
    made.add_argument("--width", type=int, help="width of the model (default 2048; smoke 128)")
    made.add_argument("--seed", type=int, default=1, help="fixes slices and moments (default: %(default)s)")
    made.add_argument("--peers", type=Path, metavar="DIR", help="folder with recovery_torchft.py")
    made.add_argument("--torchft-python", metavar="PATH", help="Python of an environment with torchft")
    made.add_argument("--peer-runs", type=int, default=2, help="torchft's kills a setting and block")
    made.add_argument("--timeout-s", type=float, default=600, help="give one run up after so long")
    made.add_argument("--out", type=Path, default=RUNS / "recovery", help="directory of the runs")
    given = made.parse_args()
    small = given.smoke
    given.blocks = given.blocks or (1 if small else BLOCKS)
    given.kills = given.kills or (1 if small else KILLS_A_RUN)
    given.stops = (0 if small else 1) if given.stops is None else given.stops
    given.spacing = given.spacing or (30 if small else 80)
    given.width = given.width or (128 if small else 2048)
    return given


def measure_ours(given: Namespace, rng: random.Random, block: int, failed: list[str]) -> Any:
    """One run of ours; shows each loss."""
    signals = ["KILL"] * given.kills + ["STOP"] * given.stops
    rng.shuffle(signals)
    faults, steps = fault_plan(rng, signals, given.spacing)
    run = run_ours(given.out / f"run-{block}", faults, steps, given.width, given.timeout_s)
    if run.error:
        failed.append(run.error)
        print(f"  ours: FAILED {run.error}", flush=True)
    for loss in run.losses:
        phases = " ".join(f"{name} {1e3 * phase_s:.0f}" for name, phase_s in loss.phases_s.items())
        print(
            f"  ours {loss.signal} {loss.mode:<9} mttr {loss.mttr_s:.3f} s, step {loss.step_s:.3f},"
            f" beyond it {loss.over_s:.3f}; ms: {phases}",
            flush=True,
        )
    for join in run.joins:
        print(f"  ours join ready {join.ready_s:.2f} s, pause {join.pause_s:.3f}, step {join.step_s:.3f}")
    return run


def measure_peer(given: Namespace, found: dict[str, list[dict[str, Any]]], failed: list[str]) -> None:
    """Torchft's kills of one block, and a SIGSTOP for each of ours."""
    if given.peers is None or given.torchft_python is None:
        return
    for heartbeat_s in HEARTBEATS_S:
        for kind in ["KILL"] * given.peer_runs + ["STOP"] * given.stops:
            told = run_torchft(
                given.torchft_python,
                given.peers,
                heartbeat_s=heartbeat_s,
                kind=kind,
                width=given.width,
                timeout_s=given.timeout_s,
            )
            if isinstance(told, str):
                failed.append(f"torchft {heartbeat_s} {kind}: {told}")
                print(f"  torchft {heartbeat_s} {kind}: FAILED {told}", flush=True)
                continue
            found.setdefault(f"{heartbeat_s} {kind}", []).append(told)
            took_s, step_s = told["recovery_s"], told["step_s"]
            print(f"  torchft {heartbeat_s} s {kind} mttr {took_s:.3f} s, step {step_s:.3f}", flush=True)


def show(ours: dict[str, Any], peers: dict[str, Any], bounds: dict[str, str]) -> None:
    def row(title: str, distribution: dict[str, float] | None) -> None:
        if distribution:
            p50, p90, most = (distribution[name] for name in ("p50", "p90", "max"))
            num = distribution["num"]
            print(f"{title:<34} p50 {p50:7.3f}  p90 {p90:7.3f}  max {most:7.3f} s  of {num}")

    for kind in ("KILL", "STOP"):
        figures = ours[kind]
        if figures["num"]:
            print(f"ours, {kind}: in place {figures['in_place']:.0%} of {figures['num']}")
        for name in ("step_s", "mttd_s", "mttr_s", "over_one_step_s"):
            row(f"  {name}", figures[name])
        for phase, distribution in figures["phases_s"].items():
            row(f"    {phase}", distribution)
    print("ours, join")
    for name, distribution in ours["join"].items():
        row(f"  {name}", distribution if isinstance(distribution, dict) else None)
    for setting, figures in peers.items():
        print(f"torchft, heartbeat {setting}")
        for name, distribution in figures.items():
            row(f"  {name}", distribution if isinstance(distribution, dict) else None)
    for bound, verdict in bounds.items():
        print(f"{verdict:<13} {bound}")


def main() -> None:
    given = options()
    exit_on_sigterm()
    load_before, rng = load1(), random.Random(given.seed)
    print(f"recovery: {given.blocks} blocks of {given.kills} kills, seed {given.seed} (load {load_before})")
    print("bound    1 step of the same run (a recovery ends with the first new one)", flush=True)
    if given.peers is None or given.torchft_python is None:
        print("peer     torchft: left out (--peers DIR --torchft-python PATH)")
    lost: list[LossSample] = []
    joined: list[JoinSample] = []
    found: dict[str, list[dict[str, Any]]] = {}
    failed: list[str] = []
    for block in range(given.blocks):
        print(f"block {block + 1} of {given.blocks}", flush=True)
        run = measure_ours(given, rng, block, failed)
        lost += run.losses
        joined += run.joins
        measure_peer(given, found, failed)
    if not lost:
        fail(f"no run had a recovery to measure: {'; '.join(failed)}")
    ours: dict[str, Any] = {
        kind: summarise_losses([loss for loss in lost if loss.signal == kind]) for kind in ("KILL", "STOP")
    }
    ours["join"] = summarise_joins(joined)
    peers = {setting: summarise_peer(results) for setting, results in found.items()}
    bounds = verdicts(ours, peers.get(f"{HEARTBEATS_S[0]} KILL"))
    show(ours, peers, bounds)
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {"seed": given.seed, "width": given.width, "ours": ours, "torchft": peers}
    figures |= {"verdicts": bounds, "failed": failed}
    hand_over("recovery", figures, given.json, smoke=given.smoke, load_before=load_before)
    if any(not text.startswith("torchft") for text in failed):
        fail("a run of ours did not end as it should")


if __name__ == "__main__":
    main()
