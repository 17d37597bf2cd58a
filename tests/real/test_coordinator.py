"""The coordinator and the runtime service die or hang while real processes train: nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import Run, finish, left_behind, processes_naming, start

from elastic.records import (
    CoordinatorStarted,
    PhaseEntered,
    Record,
    StepCommitted,
    WorkerEvent,
    WorldFormed,
    of_kind,
    read_history,
)

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

BOUND_S = 120.0
STEPS = 150
STEP_S = 0.05
SCRIPT = f"""
import time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import elastic

dataset = [{{"x": np.float32(index)}} for index in range(64)]
update = lambda state, x: state + x.mean()
with elastic.session() as session:
    for world in session.worlds():
        with world:
            mesh = world.mesh({{"data": -1}})
            state = world.restore(lambda: jnp.zeros(8), NamedSharding(mesh, P()))
            step_fn = jax.jit(update, donate_argnums=0)
            for step, batch in world.batches(dataset, global_batch=8, num_steps={STEPS}):
                time.sleep({STEP_S})
                state = step_fn(state, batch["x"])
                world.commit(step, state, {{"loss": state.sum()}})
"""


class Training:
    """A job of two slices that makes steps for some seconds; what its history says so far."""

    def __init__(self, directory: Path) -> None:
        script = directory / "train.py"
        script.write_text(textwrap.dedent(SCRIPT))
        self.directory = directory / "run"
        arguments = ["--slices", "2", "--rehearsals", "0", "--rejoin-after-steps", "3"]
        self.process = start(
            self.directory, "launch", *arguments, "--out", str(self.directory), "--", str(script)
        )

    def records(self) -> list[Record]:
        path = self.directory / "events.jsonl"
        return list(read_history(path)) if path.exists() else []

    def wait(self, condition: Callable[[list[Record]], bool], what: str) -> list[Record]:
        """Wait until the history meets a condition."""
        deadline_s = time.monotonic() + BOUND_S
        waiting = threading.Event()
        while not condition(records := self.records()):
            assert time.monotonic() < deadline_s, f"the history never had {what}"
            assert self.process.poll() is None, self.process.communicate()[0]
            waiting.wait(0.02)
        return records

    def wait_step(self, number: int) -> list[Record]:
        return self.wait(lambda records: newest_step(records) >= number, f"step {number}")

    def coordinator(self) -> int:
        """The process that commands."""
        return of_kind(self.records(), CoordinatorStarted)[-1].pid

    def worker(self, slice_index: int) -> int:
        events = of_kind(self.records(), WorkerEvent)
        return next(e.pid for e in reversed(events) if e.slice_index == slice_index and e.pid)

    def service(self) -> int:
        """The process of the newest runtime service: of those with its command, the one that listens."""
        found = [pid for pid in descendants(self.process.pid) if "jax_service" in command_of(pid)]
        (serving,) = [pid for pid in found if len(list(Path(f"/proc/{pid}/task").iterdir())) > 4]
        return serving

    def wait_taken_over(self, epoch: int) -> CoordinatorStarted:
        records = self.wait(
            lambda records: of_kind(records, CoordinatorStarted)[-1].epoch >= epoch, f"epoch {epoch}"
        )
        return of_kind(records, CoordinatorStarted)[-1]

    def end(self) -> Run:
        """Wait for the end, and check that nothing was lost and nothing is left."""
        run = finish(self.process, self.directory, timeout_s=BOUND_S)
        assert run.status == 0, run.output
        report = run.report
        assert report.steps.committed == STEPS
        assert (report.steps.lost, report.steps.repeated) == (0, 0)
        assert (report.samples.lost, report.samples.repeated) == (0, 0)
        assert set(report.invariants.values()) == {"held"}, report.invariants
        assert left_behind(report.run.id) == []
        assert processes_naming(str(self.directory)) == []
        return run


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGTERM)
        made.process.communicate(timeout=30)


def newest_step(records: list[Record]) -> int:
    return max((record.step for record in of_kind(records, StepCommitted)), default=-1)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def wait_gone(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        assert (
            subprocess.run(
                ["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=BOUND_S, check=False
            ).returncode
            == 0
        )
    finally:
        os.close(descriptor)


def worlds(run: Run) -> list[tuple[int, ...]]:
    return [record.slices for record in of_kind(run.records, WorldFormed)]


@pytest.mark.family("coordinator killed")
def test_training_goes_on_without_a_new_generation_when_the_coordinator_is_killed(training: Training) -> None:
    training.wait_step(20)
    os.kill(training.coordinator(), signal.SIGKILL)
    second = training.wait_taken_over(2)
    assert (second.phase, second.goes_on) == ("RUNNING", True)
    training.wait_step(60)
    os.kill(training.coordinator(), signal.SIGKILL)
    assert training.wait_taken_over(3).goes_on
    run = training.end()
    assert worlds(run) == [(0, 1)]
    assert run.report.recoveries == ()
    commits = of_kind(run.records, StepCommitted)
    assert len({(one.slice_index, one.step) for one in commits}) == len(commits) == 2 * STEPS


def test_coordinator_that_hangs_is_replaced_and_finds_itself_fenced(training: Training) -> None:
    training.wait_step(20)
    first = training.coordinator()
    os.kill(first, signal.SIGSTOP)
    assert training.wait_taken_over(2).goes_on
    training.wait_step(newest_step(training.records()) + 5)
    os.kill(first, signal.SIGCONT)
    wait_gone(first)
    run = training.end()
    log = (run.directory / "logs" / "coordinator.log").read_text()
    assert "this coordinator ends: " in log
    assert [one.epoch for one in of_kind(run.records, CoordinatorStarted)] == [1, 2]
    assert worlds(run) == [(0, 1)]


@pytest.mark.family("coordinator killed")
def test_coordinator_killed_in_the_middle_of_a_recovery_is_followed_by_one_that_finishes_it(
    training: Training,
) -> None:
    training.wait_step(20)
    os.kill(training.worker(1), signal.SIGKILL)
    training.wait(
        lambda records: any(record.phase == "FENCING" for record in of_kind(records, PhaseEntered)[4:]),
        "a recovery",
    )
    os.kill(training.coordinator(), signal.SIGKILL)
    assert training.wait_taken_over(2)
    run = training.end()
    assert (0,) in worlds(run)  # and slice 1 joins, if there is time


@pytest.mark.family("coordinator killed")
def test_coordinator_and_worker_killed_at_once_cost_no_step(training: Training) -> None:
    training.wait_step(20)
    coordinator, worker = training.coordinator(), training.worker(0)
    os.kill(coordinator, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    run = training.end()
    assert (1,) in worlds(run)
    assert [one.epoch for one in of_kind(run.records, CoordinatorStarted)] == [1, 2]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.family("runtime service")
def test_runtime_service_that_is_gone_costs_a_generation_and_no_slice(
    training: Training, number: signal.Signals
) -> None:
    training.wait_step(20)
    os.kill(training.service(), number)
    run = training.end()
    assert worlds(run)[:2] == [(0, 1), (0, 1)]
    assert "runtime service" in " ".join(record.why for record in of_kind(run.records, PhaseEntered))
