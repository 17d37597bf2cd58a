"""Many random faults, one after the other and one into another, on the demo model: nothing is lost.

    python tests/soak/faults.py --faults 300 --seed 1 [--per-run 12] [--coordinator]

Faults come in rounds (see docs/chaos.md): one once all slices are there, and sometimes a second one into the
recovery of the first, or into the join after it, some below the minimum of slices. The seed fixes them. Runs
follow one another until so many faults have struck: one whose moment did not come counts for nothing.
A run that fails is printed with the command that repeats it. Exit status 1 when any failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

from demo_jobs import DemoCase, DemoRun, exit_on_sigterm, run_demo
from demo_runs import END_S, what_is_wrong

from elastic.records import FaultInjected, Record, of_kind, read_history
from elastic.report_schema import Report
from reshard.errors import UsageError

PRIMARY = ("kill:slice", "kill:slice", "stop:slice", "term:slice", "host:slice", "kill:service")
"""What costs the world a slice, so that another round comes."""
COMPANION = ("kill:agent", "term:agent", "stop:agent")
"""What need not: it comes a little before the other fault of its round."""
SECOND = ("kill:slice", "stop:slice", "term:slice", "host:slice", "kill:agent")
PHASES = ("FENCING", "PLANNING", "RESTORING", "REBUILDING", "REPLAYING", "JOINING")
COORDINATOR = "kill:coordinator"
"""With `--coordinator` among the companions and the second ones: by itself it costs no slice."""
COMPANION_SHARE = 0.35
SECOND_SHARE = 0.4
SEVERAL_SHARE = 0.15
BELOW_MINIMUM_SHARE = 0.25
"""Of the runs: they need two slices, and go below it whenever two are lost."""
STEPS_A_ROUND = 40
"""Enough for a recovery and the join after it, at the demo model's pace on two cores; mostly."""
HEADER = f"{'run':>4}{'seed':>8}{'faults':>8}{'hit':>5}  {'result':<10}{'wall':>7}  recoveries"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What the runs of a seed are drawn from."""

    seed: int
    per_run: int = 12
    slices: int = 3
    coordinator: bool = False

    def cases(self, num_faults: int) -> list[DemoCase]:
        """The first runs, with so many faults in all."""
        cases: list[DemoCase] = []
        left = num_faults
        while left > 0:
            cases.append(self.case(len(cases), min(self.per_run, left)))
            left -= len(cases[-1].faults)
        return cases

    def endless(self, first: int = 0) -> Iterator[tuple[int, DemoCase]]:
        """All runs with their numbers."""
        for index in itertools.count(first):
            yield index, self.case(index, self.per_run)

    def case(self, index: int, num_faults: int) -> DemoCase:
        """One run."""
        rng = random.Random(f"{self.seed}/{index}")
        faults: list[str] = []
        rounds = 0
        while len(faults) < num_faults:
            rounds += 1
            faults += self._round(rng, rounds, num_faults - len(faults))
        minimum = 2 if rng.random() < BELOW_MINIMUM_SHARE and self.slices > 2 else 1
        return DemoCase(
            slices=self.slices,
            steps=(rounds + 1) * STEPS_A_ROUND,
            seed=rng.randrange(1_000_000),
            faults=tuple(faults),
            rejoin_after_steps=rng.choice([0, 3]),
            options=("--min-slices", str(minimum), "--quarantine-s", "0.05"),
        )

    def _round(self, rng: random.Random, number: int, most: int) -> list[str]:
        extra = (COORDINATOR,) if self.coordinator else ()
        faults: list[str] = []
        if most > 1 and rng.random() < COMPANION_SHARE:
            faults.append(_companion(rng, number, self.slices, (*COMPANION, *extra)))
        faults.append(_primary(rng, number, self.slices))
        hosts = faults[-1].count("+") + 1 if faults[-1].startswith("host") else 0
        if len(faults) < most and rng.random() < SECOND_SHARE:
            # With the memory of all hosts the state is gone: no fault to be recovered from.
            seconds = [what for what in SECOND if hosts + 1 < self.slices or "host" not in what]
            faults.append(_second(rng, number, self.slices, (*seconds, *extra)))
        return faults


def _primary(rng: random.Random, number: int, slices: int) -> str:
    what = rng.choice(list(PRIMARY))
    several = rng.random() < SEVERAL_SHARE
    most = slices - 1 if what.startswith("host") else slices
    whom = sorted(rng.sample(range(slices), rng.randint(2, most) if several and most >= 2 else 1))
    target = "" if what.endswith("service") else f"={'+'.join(map(str, whom))}"
    return f"{what}{target}@step={rng.randint(4, 8)},round={number}"


def _companion(rng: random.Random, number: int, slices: int, kinds: Sequence[str]) -> str:
    what = rng.choice(list(kinds))
    heal = f",heal={rng.choice([0.2, 1, 2])}" if what == "stop:agent" else ""
    return f"{_on_one(what, rng, slices)}@step={rng.randint(1, 8)},round={number}{heal}"


def _second(rng: random.Random, number: int, slices: int, kinds: Sequence[str]) -> str:
    what, phase = rng.choice(list(kinds)), rng.choice(PHASES)
    if what == COORDINATOR and phase == "JOINING":
        phase = "RESTORING"  # only who joins can be struck then
    return f"{_on_one(what, rng, slices)}@phase={phase},round={number}"


def _on_one(what: str, rng: random.Random, slices: int) -> str:
    return what if what == COORDINATOR else f"{what}={rng.randrange(slices)}"


@dataclass(slots=True)
class Tally:
    """What a soak has come to."""

    injected: int = 0
    recovered: int = 0
    """Faults of the runs in which nothing was wrong: of a failed run none counts."""
    missed: int = 0
    failed: list[tuple[DemoCase, list[str]]] = field(default_factory=list)
    mttr_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    modes: list[str] = field(default_factory=list)
    num_left: int = 0
    late: list[str] = field(default_factory=list)
    """Runs whose command took long to begin or to end."""
    num_runs: int = 0

    def take(self, run: DemoRun, records: Sequence[Record]) -> list[str]:
        """Count a run; returns what is wrong with it."""
        # How long the end of the command takes on a busy machine is told, and no failure.
        wrong = [sentence for sentence in what_is_wrong(run) if "passed before or after" not in sentence]
        if run.report is not None and run.wall_s - run.report.run.wall_s > END_S:
            self.late.append(f"{run.directory.name} ({run.wall_s - run.report.run.wall_s:.0f} s)")
        self.num_runs += 1
        faults = of_kind(records, FaultInjected)
        hit = len({fault.detail for fault in faults})
        self.injected += hit
        self.recovered += 0 if wrong else hit
        self.num_left += len(run.left)
        if wrong:
            self.failed.append((run.case, wrong))
        if run.report is not None:
            self.missed += len(run.report.faults_missed)
            self._take_recoveries(run.report, faults)
        return wrong

    def _take_recoveries(self, report: Report, faults: Sequence[FaultInjected]) -> None:
        for recovery in report.recoveries:
            if not recovery.lost_slices:
                continue
            self.modes.append(recovery.mode)
            before = [fault for fault in faults if fault.unix_s <= recovery.detected_unix_s]
            mine = [f for f in before if f.slice_index is None or f.slice_index in recovery.lost_slices]
            cause = max(mine or before, key=lambda fault: fault.unix_s, default=None)
            if cause is not None and recovery.mttr_s is not None:
                self.mttr_s[cause.detail.partition("=")[0].partition("@")[0]].append(recovery.mttr_s)

    def summary(self) -> Iterable[str]:
        """What to print at the end."""
        rate = 100 * self.recovered / max(self.injected, 1)
        yield f"{self.injected} faults injected, {self.recovered} in runs with nothing wrong: {rate:.1f} %"
        yield f"{self.num_runs} runs, {len(self.failed)} of them failed"
        yield f"{self.missed} asked for that found no target or no time"
        in_place = self.modes.count("in-place")
        if self.modes:
            share = 100 * in_place / len(self.modes)
            yield f"{len(self.modes)} recoveries after a loss, {in_place} in place ({share:.0f} %)"
        yield f"things left behind: {self.num_left}"
        yield f"commands that took over {END_S:.0f} s beside their run: {', '.join(self.late) or 'none'}"
        yield f"{'MTTR in seconds':<20}{'num':>5}{'p50':>8}{'p90':>8}{'max':>8}"
        for kind, values in sorted(self.mttr_s.items()):
            ordered = sorted(values)
            p50, p90 = ordered[len(ordered) // 2], ordered[min(len(ordered) * 9 // 10, len(ordered) - 1)]
            yield f"{kind:<20}{len(ordered):>5}{p50:>8.2f}{p90:>8.2f}{ordered[-1]:>8.2f}"
        for case, wrong in self.failed:
            yield f"failed: {'; '.join(wrong)}\n  again: {case.command()}"


def soak(
    cases: Iterable[tuple[int, DemoCase]], out: Path, *, timeout_s: float, num_faults: int | None = None
) -> Tally:
    """Run the numbered cases in order, all or until so many faults have struck, printing as it goes."""
    environment = dict(os.environ)
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "jax-cache"))
    tally = Tally()
    print(HEADER, flush=True)
    for index, case in cases:
        run = run_demo(case, out / f"run-{index}", timeout_s=timeout_s, environment=environment)
        records = history_of(run)
        before = tally.injected
        wrong = tally.take(run, records)
        modes = [recovery.mode for recovery in run.report.recoveries] if run.report else []
        counts = ", ".join(f"{modes.count(mode)} {mode}" for mode in dict.fromkeys(modes)) or "none"
        result = "FAILED" if wrong else "recovered"
        hit = tally.injected - before
        print(
            f"{index:>4}{case.seed:>8}{len(case.faults):>8}{hit:>5}  {result:<10}{run.wall_s:>7.0f}"
            f"  {counts}",
            flush=True,
        )
        for sentence in wrong:
            print(f"       {sentence}", flush=True)
        if wrong:
            print(f"       see {run.directory}", flush=True)
        if num_faults is not None and tally.injected >= num_faults:
            break
    print("\n".join(["", *tally.summary()]), flush=True)
    return tally


def history_of(run: DemoRun) -> list[Record]:
    """The history of a run, as far as there is one."""
    try:
        return list(read_history(run.directory / "events.jsonl"))
    except (OSError, UsageError):
        return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="fixes all faults (default: %(default)s)")
    parser.add_argument("--per-run", type=int, default=12, help="faults in a run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="begin with this run of the seed")
    parser.add_argument("--slices", type=int, default=3, help="slices of each run (default: %(default)s)")
    parser.add_argument("--coordinator", action="store_true", help="also kill the coordinator")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=1800,
        help="a run that takes longer has failed (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "soak-faults", help="directory of the runs"
    )
    given = parser.parse_args()
    if given.faults < 1 or given.per_run < 1 or given.slices < 2:
        parser.error("--faults and --per-run must be at least 1, --slices at least 2")
    exit_on_sigterm()
    draw = Draw(seed=given.seed, per_run=given.per_run, slices=given.slices, coordinator=given.coordinator)
    print(f"{given.faults} faults, seed {given.seed}")
    tally = soak(
        draw.endless(given.first),
        given.out.absolute(),
        timeout_s=given.timeout_s,
        num_faults=given.faults,
    )
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
