"""Demo runs in a row, each with a random fault: every one must complete, lose nothing, and leave nothing
behind.

    python tests/soak/demo_runs.py --runs 20 --seed 1 [--faults kill,stop,term,host,agent]

The seed fixes kind, slices, step and moment of every fault. A failing case is printed with the command that
repeats it. Exit status 1 when any run failed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from demo_jobs import DemoCase, DemoRun, exit_on_sigterm, run_demo

from elastic.demo.train import GLOBAL_BATCH

KINDS = ("kill", "stop", "term", "host", "agent")
SEVERAL = 0.25
"""The share of runs that lose several slices at once, though never all of them."""
END_S = 20.0
"""What may pass beside the run itself: the start of the command, and the end of everything it started."""
HEADER = f"{'run':>5}  {'fault':<28}{'seed':>7}  {'result':<10}{'wall':>8}{'mttd':>8}{'mttr':>8}  recoveries"


def random_cases(num: int, *, seed: int, kinds: Sequence[str], slices: int, steps: int) -> list[DemoCase]:
    """The cases of a seed. The first of two soaks with the same seed are the same, however many follow."""
    return [_random_case(random.Random(f"{seed}/{index}"), kinds, slices, steps) for index in range(num)]


def _random_case(rng: random.Random, kinds: Sequence[str], slices: int, steps: int) -> DemoCase:
    num_victims = rng.randint(2, slices - 1) if slices > 2 and rng.random() < SEVERAL else 1
    victims = "+".join(map(str, sorted(rng.sample(range(slices), num_victims))))
    kind = rng.choice(list(kinds))
    what = "kill:agent" if kind == "agent" else f"{kind}:slice"
    return DemoCase(
        slices=slices,
        steps=steps,
        seed=rng.randrange(1_000_000),
        faults=(f"{what}={victims}@step={rng.randrange(steps)}",),
        rejoin_after_steps=rng.choice([0, steps // 8, steps // 3]),
    )


def what_is_wrong(run: DemoRun) -> list[str]:
    """Every way in which a run is not what the demo promises; empty for a good one."""
    wrong = [f"left {thing}" for thing in run.left]
    if run.status != 0:
        wrong.append("did not end in time" if run.status is None else f"exit status {run.status}")
    report = run.report
    if report is None:
        return [*wrong, "no report"]
    beside_s = run.wall_s - report.run.wall_s
    if beside_s > END_S:
        wrong.append(f"{beside_s:.0f} s passed before or after the run of {report.run.wall_s:.0f} s")
    if report.run.outcome != "completed":
        broken = [f"invariant {name} is broken" for name in report.broken]
        return [*wrong, f"outcome {report.run.outcome}: {report.run.error}", *broken]
    counts = {
        "steps committed": (report.steps.committed, run.case.steps),
        "steps lost": (report.steps.lost, 0),
        "steps repeated": (report.steps.repeated, 0),
        "samples consumed": (report.samples.consumed, run.case.steps * GLOBAL_BATCH),
        "samples lost": (report.samples.lost, 0),
        "samples repeated": (report.samples.repeated, 0),
    }
    wrong += [
        f"{name}: {found}, not {expected}" for name, (found, expected) in counts.items() if found != expected
    ]
    wrong += [
        f"invariant {name} is {verdict}" for name, verdict in report.invariants.items() if verdict != "held"
    ]
    if report.final.state_digest == "":
        wrong.append("no digest of the final state")
    if not (run.directory / "report.html").is_file():
        wrong.append("no report.html")
    return wrong


def row(index: int, run: DemoRun, wrong: Sequence[str]) -> str:
    """One line of the table."""
    recoveries = run.report.recoveries if run.report else ()
    losses = [recovery for recovery in recoveries if recovery.lost_slices]
    mttd = f"{losses[0].mttd_s:.3f}" if losses else "-"
    mttr = f"{losses[0].mttr_s:.3f}" if losses and losses[0].mttr_s is not None else "-"
    modes = ", ".join(recovery.mode for recovery in recoveries) or "none"
    return (
        f"{index:>5}  {run.case.faults[0]:<28}{run.case.seed:>7}  {'FAILED' if wrong else 'completed':<10}"
        f"{run.wall_s:>8.1f}{mttd:>8}{mttr:>8}  {modes}"
    )


def soak(cases: Sequence[DemoCase], out: Path, *, timeout_s: float) -> list[tuple[DemoCase, list[str]]]:
    """Run the cases in order, printing as it goes; return those that failed, with what was wrong."""
    environment = dict(os.environ)
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "jax-cache"))
    failed = []
    first_modes = []
    print(HEADER, flush=True)
    for index, case in enumerate(cases):
        run = run_demo(case, out / f"run-{index}", timeout_s=timeout_s, environment=environment)
        wrong = what_is_wrong(run)
        print(row(index, run, wrong), flush=True)
        for sentence in wrong:
            print(f"       {sentence}", flush=True)
        if wrong:
            failed.append((case, wrong))
            print(f"       see {run.directory}", flush=True)
        recoveries = run.report.recoveries if run.report else ()
        first_modes += [recovery.mode for recovery in recoveries if recovery.lost_slices][:1]
    print(
        f"\nfirst recoveries: {first_modes.count('in-place')} in place,"
        f" {first_modes.count('respawn')} by respawn"
    )
    for case, wrong in failed:
        print(f"failed: {'; '.join(wrong)}\n  again: {case.command()}")
    print(f"{len(cases) - len(failed)} completed, {len(failed)} failed", flush=True)
    return failed


def fault_kinds(text: str) -> tuple[str, ...]:
    """The kinds in a comma-separated list."""
    kinds = tuple(text.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no fault is called {unknown[0]!r} (there are {', '.join(KINDS)})")
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, help="skip so many of the seed's cases (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="fixes all faults (default: %(default)s)")
    parser.add_argument(
        "--faults", type=fault_kinds, default=KINDS, help=f"kinds to draw from (default: {','.join(KINDS)})"
    )
    parser.add_argument("--slices", type=int, default=3, help="slices of each run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (default: %(default)s)")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=240,
        help="a run that takes longer has failed (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "soak",
        help="directory of the runs (default: %(default)s)",
    )
    given = parser.parse_args()
    if given.runs < 1 or given.slices < 2 or given.steps < 1:
        parser.error("--runs and --steps must be at least 1, --slices at least 2")
    exit_on_sigterm()
    cases = random_cases(
        given.first + given.runs, seed=given.seed, kinds=given.faults, slices=given.slices, steps=given.steps
    )[given.first :]
    print(
        f"{given.runs} demo runs of {given.steps} steps, seed {given.seed}, faults {', '.join(given.faults)}"
    )
    return 1 if soak(cases, given.out.absolute(), timeout_s=given.timeout_s) else 0


if __name__ == "__main__":
    sys.exit(main())
