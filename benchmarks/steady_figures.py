"""What bench_steady_overhead makes of what its processes measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from figures import Interval, median_interval, overheads, own_noise

MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The result: overheads over the bare loop as fractions, and where the time goes, in milliseconds a step.

    `cpu` compares the workers' CPU time, which other load on the machine disturbs less than it does wall
    time. `by_parts` adds up the medians of what the engine does in the loop, and divides by a bare step.
    """

    overhead: Interval
    floor: Interval
    typical: Interval
    cpu: Interval
    by_parts: float
    noise: float
    pairs: tuple[float, ...]
    step_ms: dict[str, float]
    cpu_ms: dict[str, float]
    engine_cpu_ms: dict[str, dict[str, float]]
    parts_ms: dict[str, float]


def block_times(measured: Sequence[dict[str, Any]], kind: str, *, typical: bool = False) -> list[float]:
    """Seconds of a step in each block of a kind, in order of rounds: the slowest process's mean (or median)
    step.

    The processes of a job wait for each other in every step, so the slowest is the job's pace.
    """
    summary = statistics.median if typical else statistics.fmean
    per_process = [[summary(block["step_s"]) for block in _blocks(one, kind)] for one in measured]
    return [max(times) for times in zip(*per_process, strict=True)]


def steady_figures(measured: Sequence[dict[str, Any]], stall_s: dict[int, float]) -> Steady:
    """Compare the blocks. `stall_s` is, from the history, the longest that a step's capture held a worker."""
    bare = block_times(measured, "bare")
    wrapped = block_times(measured, "wrapped")
    pairs = overheads(wrapped, bare)
    typical = overheads(
        block_times(measured, "wrapped", typical=True), block_times(measured, "bare", typical=True)
    )
    kinds = ("bare", "wrapped", "floor")
    parts = _parts_ms(measured, stall_s)
    step_ms = {kind: MS * statistics.median(block_times(measured, kind)) for kind in kinds}
    extra_ms = parts["wrapped_batch"] - parts["bare_batch"] + parts["wrapped_commit"]
    return Steady(
        overhead=median_interval(pairs),
        floor=median_interval(overheads(block_times(measured, "floor"), bare)),
        typical=median_interval(typical),
        cpu=median_interval(overheads(_block_cpu_s(measured, "wrapped"), _block_cpu_s(measured, "bare"))),
        by_parts=extra_ms / step_ms["bare"],
        noise=own_noise(bare),
        pairs=tuple(pairs),
        step_ms=step_ms,
        cpu_ms={kind: _cpu_ms(measured, kind) for kind in kinds},
        engine_cpu_ms={kind: _engine_cpu_ms(measured, kind) for kind in kinds},
        parts_ms=parts,
    )


def _parts_ms(measured: Sequence[dict[str, Any]], stall_s: dict[int, float]) -> dict[str, float]:
    bare = {name: part_ms(measured, "bare", name) for name in ("batch", "dispatch", "wait")}
    split = {name: part_ms(measured, "split", name) for name in ("batch", "dispatch", "wait", "commit")}
    split_steps = [step for block in _blocks(measured[0], "split") for step in block["steps"]]
    stalls = [stall_s[step] for step in split_steps if step in stall_s]
    capture = MS * statistics.median(stalls) if stalls else 0.0
    ids = MS * statistics.median(time for one in measured for time in one["batch_parts_s"]["sample_ids"])
    make = MS * statistics.median(time for one in measured for time in one["batch_parts_s"]["make"])
    return {
        **{f"bare_{name}": value for name, value in bare.items()},
        **{f"wrapped_{name}": value for name, value in split.items()},
        "capture": capture,
        "commit_rest": split["commit"] - capture,
        "sample_ids": ids,
        "make_batch": make,
        "journal_and_checks": split["batch"] - ids - make,
        "copy_and_hash": part_ms(measured, "floor", "copy_and_hash"),
    }


def part_ms(measured: Sequence[dict[str, Any]], kind: str, part: str) -> float:
    """Median over all steps and processes of one part of a step."""
    return MS * statistics.median(
        time for one in measured for block in _blocks(one, kind) for time in block["parts_s"][part]
    )


def _block_cpu_s(measured: Sequence[dict[str, Any]], kind: str) -> list[float]:
    """CPU of all workers together in each block of a kind."""
    per_process = [[block["cpu_s"] for block in _blocks(one, kind)] for one in measured]
    return [sum(times) for times in zip(*per_process, strict=True)]


def _cpu_ms(measured: Sequence[dict[str, Any]], kind: str) -> float:
    """CPU of all workers together, a step."""
    num_steps = sum(len(block["step_s"]) for block in _blocks(measured[0], kind))
    return MS * sum(_block_cpu_s(measured, kind)) / num_steps


def _engine_cpu_ms(measured: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """CPU of launcher, coordinator and agents, a step; told by one process."""
    blocks = [block for one in measured for block in _blocks(one, kind) if block["engine_cpu_s"]]
    num_steps = sum(len(block["step_s"]) for block in blocks)
    roles = blocks[0]["engine_cpu_s"] if blocks else ()
    return {role: MS * sum(block["engine_cpu_s"][role] for block in blocks) / num_steps for role in roles}


def _blocks(one: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [block for block in one["blocks"] if block["kind"] == kind and block["round_index"] >= 0]
