"""Workers killed at one step whatever is tried end the job with that; lost slices never do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_job import Job

from elastic.events import Phase
from elastic.memory_evidence import MemoryWatch, memory_group
from elastic.records import WorldFormed
from elastic.repeated_deaths import Deaths

SAID = "the kernel killed once for want of memory in control group job (its limit is 64.0 MB)"


def kill_in_each_world(job: Job, times: int) -> None:
    """Kill the first slice of a world as soon as it replays, in so many worlds."""
    generation = job.state.generation
    job.kill_worker(job.state.world[0])
    if times > 1:
        job.when(
            lambda job: job.state.phase is Phase.REPLAYING and job.state.generation > generation,
            lambda: kill_in_each_world(job, times - 1),
        )


def test_three_worlds_with_a_worker_killed_at_the_same_step_end_the_job_and_name_the_step() -> None:
    job = Job(4, replicas=4)
    job.when_step(7, lambda: kill_in_each_world(job, 3))
    job.run()
    outcome, error = job.outcome
    assert outcome == "failed"
    assert error.startswith(
        "killed at step 8 3 times in a row (exit by SIGKILL; slices 0, 1, 2): out of memory?"
    )


def test_two_of_which_the_kernel_owns_up_to_are_enough() -> None:
    job = Job(4, replicas=4)
    job.kernel_says = SAID
    job.when_step(7, lambda: kill_in_each_world(job, 4))
    job.run()
    assert job.outcome == (
        "failed",
        f"killed at step 8 2 times in a row (exit by SIGKILL; slices 0, 1): out of memory, {SAID};"
        " let the step or its input need less",
    )


def test_two_losses_at_a_step_are_losses() -> None:
    job = Job(4, replicas=4, rejoin_after_steps=None)
    job.when_step(7, lambda: kill_in_each_world(job, 2))
    job.run()
    job.assert_completed()
    assert job.records(WorldFormed)[-1].slices == (2, 3)


def test_all_slices_killed_at_once_are_one_try() -> None:
    job = Job(3)
    job.when_step(7, lambda: job.kill_workers(0, 1, 2))
    job.run()
    job.assert_completed()


def test_a_new_step_between_forgets_the_deaths_before() -> None:
    job = Job(4, replicas=4, num_steps=30)
    for step in (3, 8, 13, 18):
        job.when_step(step, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_verdict_comes_exactly_with_enough_worlds_in_a_row_at_one_step(
    moves: list[tuple[int, int]],
) -> None:
    deaths, generation, step = Deaths(), 0, 0
    seen: list[tuple[int, int]] = []
    for new_steps, new_worlds in moves:
        step, generation = step + new_steps, generation + new_worlds
        deaths = deaths.died(step, generation, 0, "SIGKILL", "")
        seen.append((step, generation))
        row = {g for s, g in seen if s == step}
        assert bool(deaths.verdict(3)) == (len(row) >= 3)


def test_other_signals_are_told_as_crashes() -> None:
    deaths = Deaths()
    for generation in (4, 5, 6):
        deaths = deaths.died(11, generation, generation - 4, "SIGSEGV", "")
    assert deaths.verdict(3).startswith(
        "killed at step 12 3 times in a row (exit by SIGSEGV; slices 0, 1, 2)"
    )
    assert "memory" not in deaths.verdict(3)


def machine_with(tmp_path: Path, cgroup: str, group: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(cgroup)
    (root / group).mkdir(parents=True)
    for name, text in files.items():
        (root / group / name).write_text(text)
    return root, proc


@pytest.mark.parametrize(
    ("cgroup", "group", "count", "limit"),
    [
        ("0::/pod/job\n", "pod/job", "memory.events", "memory.max"),
        ("4:memory:/pod/job\n0::/\n", "memory/pod/job", "memory.oom_control", "memory.limit_in_bytes"),
    ],
    ids=["v2", "v1"],
)
def test_kills_that_a_control_group_counts_are_told_with_its_limit(
    tmp_path: Path, cgroup: str, group: str, count: str, limit: str
) -> None:
    root, proc = machine_with(tmp_path, cgroup, group, {count: "oom 9\noom_kill 2\n", limit: "64000000\n"})
    watch = MemoryWatch(7, root=root, proc=proc)
    assert watch.evidence() == ""
    (root / group / count).write_text("oom 10\noom_kill 3\n")
    assert watch.evidence() == SAID
    (root / group / limit).write_text("max\n")
    (root / group / count).write_text("oom_kill 4\n")
    assert watch.evidence() == "the kernel killed 2 times for want of memory in control group job"


def test_a_process_that_moves_to_another_group_is_judged_by_that_ones_count(tmp_path: Path) -> None:
    root, proc = machine_with(tmp_path, "0::/a\n", "a", {"memory.events": "oom_kill 0\n"})
    watch = MemoryWatch(7, root=root, proc=proc)
    (root / "b").mkdir()
    (root / "b" / "memory.events").write_text("oom_kill 5\n")
    (proc / "7" / "cgroup").write_text("0::/b\n")
    watch.look()
    (root / "a" / "memory.events").write_text("oom_kill 1\n")
    assert watch.evidence() == ""


@pytest.mark.parametrize("cgroup", ["", "0::/../elsewhere\n", "0::/gone\n"])
def test_nothing_is_told_where_there_is_no_group_to_see(tmp_path: Path, cgroup: str) -> None:
    root, proc = machine_with(tmp_path, cgroup, "a", {})
    assert memory_group(7, root, proc) is None
    assert MemoryWatch(7, root=root, proc=proc).evidence() == ""
    assert MemoryWatch(8, root=root, proc=proc).evidence() == ""
