"""What bench_recovery makes of histories: losses and joins of a run, each beside a step of it. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from figures import spread

from elastic.records import Record, StepCommitted, WorkerEvent, WorldFormed, of_kind
from elastic.report_schema import Recovery

SETTLING_STEPS = 2
"""The first steps of a world: they load its program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSample:
    """One recovery from one loss in a whole world. `over_s` is what it took beyond one step."""

    signal: str
    mode: str
    step_s: float
    mttd_s: float
    mttr_s: float
    phases_s: dict[str, float]

    @property
    def over_s(self) -> float:
        """Its time beyond one step."""
        return self.mttr_s - self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSample:
    """A returning worker. `ready_s`: from its start until it can join; `joined_s`: until the first step
    with it; `pause_s` is the longest time between two steps of the others meanwhile.
    """

    step_s: float
    ready_s: float
    joined_s: float
    pause_s: float

    @property
    def over_s(self) -> float:
        """The pause beyond one step."""
        return self.pause_s - self.step_s


def commit_times(records: Sequence[Record]) -> dict[int, list[float]]:
    """When each step of each generation was committed by the first slice that did, in order."""
    first: dict[tuple[int, int], float] = {}
    for commit in of_kind(records, StepCommitted):
        first.setdefault((commit.generation, commit.step), commit.unix_s)
    times: dict[int, list[float]] = {}
    for (generation, _), unix_s in sorted(first.items()):
        times.setdefault(generation, []).append(unix_s)
    return times


def step_of(times: Sequence[float]) -> float | None:
    """The median time from one commit to the next, without the first ones; None for too few."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[SETTLING_STEPS:])]
    return statistics.median(gaps) if len(gaps) > 2 else None


def losses(records: Sequence[Record], recoveries: Sequence[Recovery], num_slices: int) -> list[LossSample]:
    """The recoveries from the loss of one slice of a world that had all."""
    times = commit_times(records)
    whole = {w.generation for w in of_kind(records, WorldFormed) if len(w.slices) == num_slices}
    found = []
    for recovery in recoveries:
        before = max((g for g in times if g < recovery.generation), default=0)
        step_s = step_of(times.get(before, ()))
        if len(recovery.lost_slices) != 1 or recovery.joined_slices or before not in whole:
            continue
        if step_s is None or recovery.mttr_s is None:
            continue
        found.append(
            LossSample(
                signal="STOP" if "SIGSTOP" in recovery.cause else "KILL",
                mode=recovery.mode,
                step_s=step_s,
                mttd_s=recovery.mttd_s,
                mttr_s=recovery.mttr_s,
                phases_s=asdict(recovery.phases_s),
            )
        )
    return found


def joins(records: Sequence[Record], recoveries: Sequence[Recovery]) -> list[JoinSample]:
    """The worlds that grew, of those whose worker was started while the others trained."""
    times = commit_times(records)
    events = list(of_kind(records, WorkerEvent))
    found = []
    for recovery in recoveries:
        before = max((g for g in times if g < recovery.generation), default=0)
        step_s = step_of(times.get(before, ()))
        if len(recovery.joined_slices) != 1 or recovery.lost_slices or step_s is None:
            continue
        own = [e for e in events if e.slice_index == recovery.joined_slices[0]]
        started = [e.unix_s for e in own if e.state == "started" and e.unix_s < recovery.fault_unix_s]
        ready = [e.unix_s for e in own if e.state == "ready" and e.unix_s <= recovery.fault_unix_s]
        after = times.get(recovery.generation, [])
        if not (started and ready and after) or ready[-1] < started[-1]:
            continue
        # All that the others wait while somebody joins; the start of the process is beside their steps.
        seen = [*(t for t in times[before] if t > started[-1]), after[0]]
        if len(seen) < 2:
            continue
        found.append(
            JoinSample(
                step_s=step_s,
                ready_s=ready[-1] - started[-1],
                joined_s=after[0] - started[-1],
                pause_s=max(b - a for a, b in itertools.pairwise(seen)),
            )
        )
    return found


def spread_of(values: Sequence[float]) -> dict[str, float] | None:
    """Number, p50, p90 and the largest; None for no values."""
    return spread(values).as_dict() if values else None


def summarise_losses(samples: Sequence[LossSample]) -> dict[str, Any]:
    """The distributions of losses by one signal; in place is given as a share, and its times apart."""
    in_place = [sample for sample in samples if sample.mode == "in-place"]
    return {
        "num": len(samples),
        "in_place": round(len(in_place) / len(samples), 4) if samples else None,
        "step_s": spread_of([sample.step_s for sample in samples]),
        "mttd_s": spread_of([sample.mttd_s for sample in samples]),
        "mttr_s": spread_of([sample.mttr_s for sample in samples]),
        "mttr_in_place_s": spread_of([sample.mttr_s for sample in in_place]),
        "over_one_step_s": spread_of([sample.over_s for sample in in_place]),
        "phases_s": {
            phase: spread_of([sample.phases_s[phase] for sample in in_place])
            for phase in (samples[0].phases_s if samples else ())
        },
    }


def summarise_joins(samples: Sequence[JoinSample]) -> dict[str, Any]:
    """The distributions of joins."""
    return {
        "num": len(samples),
        "step_s": spread_of([sample.step_s for sample in samples]),
        "ready_s": spread_of([sample.ready_s for sample in samples]),
        "joined_s": spread_of([sample.joined_s for sample in samples]),
        "pause_s": spread_of([sample.pause_s for sample in samples]),
        "pause_over_one_step_s": spread_of([sample.over_s for sample in samples]),
    }


def summarise_peer(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same of the JSON lines of torchft's script, one a loss."""
    over = [result["recovery_s"] - result["step_s"] for result in results]
    joined = [result for result in results if "rejoin_s" in result]
    pauses = [r["survivor_longest_gap_in_rejoin_s"] for r in joined]
    return {
        "num": len(results),
        "step_s": spread_of([result["step_s"] for result in results]),
        "mttr_s": spread_of([result["recovery_s"] for result in results]),
        "over_one_step_s": spread_of(over),
        "ready_s": spread_of([r["rejoin_process_start_to_ready_s"] for r in joined]),
        "joined_s": spread_of([r["rejoin_s"] for r in joined]),
        "pause_s": spread_of(pauses),
    }


def verdicts(ours: dict[str, Any], peer: dict[str, Any] | None) -> dict[str, str]:
    """Each bound with "met", "missed" or "not measured"; `peer` is torchft with a heartbeat of 0.5 s."""

    def judge(value: float | None, bound: float | None) -> str:
        if value is None or bound is None:
            return "not measured"
        return "met" if value <= bound else "missed"

    def of(group: dict[str, Any] | None, name: str, figure: str) -> float | None:
        distribution = None if group is None else group.get(name)
        return None if distribution is None else float(distribution[figure])

    kill, stop, join = ours["KILL"], ours["STOP"], ours["join"]
    share = kill["in_place"]
    return {
        "kill in place p50 <= one step + 0.25 s": judge(of(kill, "over_one_step_s", "p50"), 0.25),
        "kill in place p90 <= one step + 0.5 s": judge(of(kill, "over_one_step_s", "p90"), 0.5),
        "kill faster than torchft (0.5 s), p50": judge(of(kill, "mttr_s", "p50"), of(peer, "mttr_s", "p50")),
        "in place >= 98 %": judge(None if share is None else 1 - share, 0.02),
        "stop p50 <= one step + 1 s": judge(of(stop, "over_one_step_s", "p50"), 1.0),
        "join ready sooner than torchft, p50": judge(of(join, "ready_s", "p50"), of(peer, "ready_s", "p50")),
        "join pause p50 <= one step + 0.3 s": judge(of(join, "pause_over_one_step_s", "p50"), 0.3),
        "join pause shorter than torchft, p50": judge(of(join, "pause_s", "p50"), of(peer, "pause_s", "p50")),
    }
