"""The benchmarks' arithmetic is right, and each benchmark runs at its small size."""

import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from bench_demo_recovery import cases
from bench_import import slowest_modules
from demo_jobs import MARK, marked_processes
from figures import Interval, median_interval, overheads, own_noise, percentile, spread
from hypothesis import given
from hypothesis import strategies as st
from recovery_figures import Sample, steady_step_s, summarise
from steady_figures import block_times, steady_figures
from steady_overhead_loop import num_commits, schedule

from elastic.records import FaultInjected, StepCommitted, WorldFormed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUN_A_JOB = ("bench_recovery", "bench_demo_recovery", "bench_steady_overhead")
BENCHES = [
    pytest.param(name, marks=pytest.mark.family("benchmarks of jobs")) if name in RUN_A_JOB else name
    for name in sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
]
times = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=40)


# ---- figures ----


def test_percentile_is_the_nearest_rank():
    assert [percentile([4, 1, 3, 2], percent) for percent in (0, 25, 26, 50, 90, 100)] == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("figure", [lambda: percentile([], 50), lambda: median_interval([])])
def test_figures_of_no_values_are_an_error(figure):
    with pytest.raises(ValueError, match="of no values"):
        figure()


@given(times)
def test_spread_is_ordered_and_made_of_its_values(values):
    found = spread(values)
    assert min(values) <= found.p50 <= found.p90 <= found.max == max(values)
    assert {found.p50, found.p90, found.max} <= set(values)


@given(times)
def test_median_interval_holds_the_median_and_stays_within_the_values(values):
    found = median_interval(values, resamples=50)
    assert found.median == statistics.median(values)
    assert min(values) <= found.low <= found.high <= max(values)


def test_median_interval_is_fixed_by_its_seed():
    values = [0.01 * index**2 for index in range(12)]
    assert median_interval(values, seed=3) == median_interval(values, seed=3)
    assert median_interval(values).low < median_interval(values).median < median_interval(values).high


def test_median_interval_shrugs_off_a_straggler():
    assert median_interval([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 50.0]).median == 1.0


def test_interval_spans_a_target_only_when_both_sides_are_open():
    interval = Interval(median=0.02, low=0.01, high=0.05)
    assert [interval.spans(target) for target in (0.005, 0.01, 0.03, 0.05, 0.06)] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_overheads_are_fractions_above_the_base():
    assert overheads([1.03, 1.0], [1.0, 2.0]) == [pytest.approx(0.03), -0.5]
    with pytest.raises(ValueError, match="positive"):
        overheads([1.0], [0.0])
    with pytest.raises(ValueError, match="zip"):
        overheads([1.0], [1.0, 1.0])


def test_own_noise_is_the_change_between_neighbours():
    assert own_noise([1.0, 1.1, 1.1, 0.99]) == pytest.approx(0.1)
    assert own_noise([1.0]) == 0.0


# ---- steady overhead ----


def test_schedule_gives_each_kind_each_place_equally_often():
    main = [(index, kind) for index, kind in schedule(12) if 0 <= index < 12]
    places = Counter((place % 3, kind) for place, (_, kind) in enumerate(main))
    assert len(main) == 36
    assert set(places.values()) == {4}


def test_schedule_warms_up_every_kind_first_and_mirrors_neighbours():
    blocks = schedule(2)
    assert [index for index, _ in blocks[:3]] == [-1, -1, -1]
    assert {kind for _, kind in blocks[:3]} == {"bare", "wrapped", "floor"}
    kinds = [kind for _, kind in blocks[3:9]]
    assert kinds[:3] == kinds[:2:-1]


def test_num_commits_counts_the_steps_not_counted_too():
    assert num_commits(rounds=4, block=10) == (1 + 4 + 2) * 11


def measured(bare_s: float, wrapped_s: float, *, slower: float = 1.0) -> dict:
    def block(round_index: int, kind: str, parts_s: dict[str, float]) -> dict:
        return {
            "round_index": round_index,
            "kind": kind,
            "step_s": [slower * sum(parts_s.values())] * 2,
            "parts_s": {name: [part_s] * 2 for name, part_s in parts_s.items()},
            "steps": [2 * round_index, 2 * round_index + 1],
            "cpu_s": 2 * slower * sum(parts_s.values()),
            "engine_cpu_s": {"agents": 0.002},
        }

    bare = {"batch": 0.001, "dispatch": 0.001, "wait": bare_s - 0.002}
    wrapped = {"batch": 0.002, "dispatch": 0.001, "commit": wrapped_s - 0.003}
    rounds = [
        block(index, kind, parts)
        for index in range(4)
        for kind, parts in (("bare", bare), ("wrapped", wrapped), ("floor", bare | {"copy_and_hash": 0.002}))
    ]
    split = {"batch": 0.002, "dispatch": 0.001, "wait": bare_s - 0.002, "commit": 0.004}
    return {
        "blocks": [block(-1, "bare", {"batch": 9.0}), *rounds, block(4, "split", split)],
        "batch_parts_s": {"sample_ids": [0.0001], "make": [0.0009]},
    }


def test_block_times_are_the_slowest_process_without_the_warm_up():
    processes = [measured(0.1, 0.102), measured(0.1, 0.102, slower=1.5)]
    assert block_times(processes, "bare") == [pytest.approx(0.15)] * 4


def test_steady_figures_find_overhead_floor_and_parts():
    found = steady_figures([measured(0.1, 0.102)] * 3, stall_s={8: 0.003, 9: 0.003})
    assert found.overhead.median == pytest.approx(0.02)
    assert found.floor.median == pytest.approx(0.02)
    assert found.cpu.median == pytest.approx(0.02)
    assert found.by_parts == pytest.approx((0.001 + 0.004) / 0.1)
    assert found.engine_cpu_ms["bare"] == {"agents": pytest.approx(1.0)}
    assert found.cpu_ms["bare"] == pytest.approx(300)
    assert found.parts_ms["capture"] == pytest.approx(3)
    assert found.parts_ms["commit_rest"] == pytest.approx(1)
    assert found.parts_ms["journal_and_checks"] == pytest.approx(1)


# ---- import ----


def test_slowest_modules_are_by_own_time():
    printed = (
        "import time: self [us] | cumulative | imported package\n"
        "import time:  10 |  30 |   a\nimport time: 20 | 20 | b.c\n"
    )
    assert slowest_modules(printed, 1) == [("b.c", 20e-6)]


# ---- recovery ----


def committed(generation: int, step: int, slice_index: int, unix_s: float, step_s: float) -> StepCommitted:
    return StepCommitted(
        unix_s=unix_s,
        generation=generation,
        slice_index=slice_index,
        step=step,
        position=step,
        sample_ids=(step,),
        loss=None,
        step_s=step_s,
        stall_s=0.0,
        captured_bytes=1,
    )


def world(generation: int, mode: str) -> WorldFormed:
    return WorldFormed(
        unix_s=0.0,
        generation=generation,
        slices=(0, 1),
        mode=mode,
        restored_step=None,
        newest_committed=-1,
        lost=(),
        joined=(),
        bytes_moved=0,
        bytes_lower_bound=0,
        explanation="",
    )


def test_steady_step_leaves_out_rehearsal_first_steps_and_what_follows_the_fault():
    history = [world(1, "rehearsal"), committed(1, 0, 0, 1.0, 9.0), world(2, "first")]
    history += [committed(2, step, 0, 2.0 + step, 0.1) for step in range(6)]
    history += [committed(2, step, 1, 2.0 + step, 5.0 if step < 3 else 0.2) for step in range(6)]
    history += [FaultInjected(unix_s=9.0, fault="kill", slice_index=1), committed(2, 8, 0, 10.0, 7.0)]
    assert steady_step_s(history) == 0.2
    assert steady_step_s([]) is None


def sample(mode: str, mttr_s: float | None) -> Sample:
    return Sample(
        fault="kill:slice=1@step=3",
        mode=mode,
        step_s=0.1,
        mttd_s=0.05,
        mttr_s=mttr_s,
        phases_s={"detect": 0.05, "fence": 0.1},
        rejoin_s=None,
    )


def test_a_recovery_is_in_bounds_only_within_both():
    assert sample("in-place", 0.8).allowed_s == pytest.approx(0.8)
    assert sample("in-place", 0.79).in_bounds
    assert not sample("in-place", 0.81).in_bounds
    assert not sample("in-place", None).in_bounds


def test_summarise_tells_in_place_from_respawn():
    found = summarise(
        [sample("in-place", 0.5), sample("in-place", 0.9), sample("respawn", 6.0), sample("respawn", None)]
    )
    assert (found["recoveries"], found["resumed"], found["in_place"]) == (4, 3, 0.5)
    assert (found["in_bounds"], found["in_bounds_of_in_place"]) == (0.25, 0.5)
    assert found["mttr_s"]["max"] == 6.0
    assert found["mttr_in_place_s"]["max"] == 0.9
    assert found["rejoin_s"] is None


def test_recovery_cases_are_fixed_by_the_seed_and_kill_in_the_first_half():
    drawn = cases(20, slices=3, steps=60, seed=7)
    assert drawn == cases(20, slices=3, steps=60, seed=7)
    assert all(10 <= int(case.faults[0].partition("step=")[2]) <= 30 for case in drawn)
    assert len({case.faults for case in drawn}) > 5


# ---- looking for what a run left ----


def test_marked_processes_are_found_by_their_mark_alone():
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env=os.environ | {MARK: "one-of-mine"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()
        assert list(marked_processes("one-of-mine")) == [child.pid]
        assert list(marked_processes("one-of-min")) == []
        child.stdin.close()
    assert list(marked_processes("one-of-mine")) == []


# ---- each of them runs ----


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BENCHES)
def test_smoke_prints_one_json_line_and_writes_it(name, tmp_path):
    out = ["--out", str(tmp_path / "job")] if name in RUN_A_JOB else []
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / f"{name}.py"),
            "--smoke",
            "--json",
            str(tmp_path / "figures.json"),
            *out,
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures == json.loads((tmp_path / "figures.json").read_text())
    assert f"bench_{figures['bench']}" == name
    assert figures["smoke"] is True
