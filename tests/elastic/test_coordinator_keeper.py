"""The launcher's care for its coordinator, on a clock of the tests' own, with processes that do nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.arbiter import Tenure
from elastic.coordinator_keeper import MAX_STARTS, CoordinatorKeeper
from reshard.errors import JobFailedError

LEASE_S = 3.0


class Store:
    def __init__(self) -> None:
        self.record: Tenure | None = None

    def read(self) -> Tenure | None:
        return self.record


class Bench:
    def __init__(self, directory: Path) -> None:
        self.now_s = 0.0
        self.store = Store()
        self.started: list[subprocess.Popen[bytes]] = []
        self.keeper = CoordinatorKeeper(
            self._start,
            self.store,
            directory / "coordinator.log",
            lambda: self.now_s,  # type: ignore[arg-type]
        )

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.started.append(process)
        return process

    def hold(self) -> None:
        """The newest process has its term of office."""
        epoch = len(self.started)
        holder = f"{self.started[-1].pid}-nonce"
        self.store.record = Tenure(epoch=epoch, holder=holder, machine="m", lease_s=LEASE_S)

    def kill(self) -> None:
        self.started[-1].kill()
        self.started[-1].wait()

    def kill_all(self, num: int, step: int = -1) -> None:
        for _ in range(num):
            self.kill()
            self.look_for(6.0)
            self.keeper.note_step(step)

    def look_for(self, seconds: float, *, renewing: bool = False) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.1
            if renewing and self.store.record is not None:
                self.store.record = replace(self.store.record, beat=self.store.record.beat + 1)
            self.keeper.look()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.keeper.start()
    yield made
    for process in made.started:
        with process:
            process.kill()


def test_coordinator_that_ended_is_started_again(bench: Bench) -> None:
    bench.hold()
    bench.kill()
    bench.look_for(6.0)
    assert len(bench.started) == 2
    assert [process.pid for process in bench.keeper.processes()] == [bench.started[-1].pid]


def test_coordinator_that_renews_is_left_alone(bench: Bench) -> None:
    bench.hold()
    bench.look_for(30.0, renewing=True)
    assert len(bench.started) == 1


def test_coordinator_whose_lease_ran_out_gets_a_successor_and_is_not_killed(bench: Bench) -> None:
    bench.hold()
    bench.look_for(LEASE_S - 0.5)
    assert len(bench.started) == 1
    bench.look_for(1.0)
    assert len(bench.started) == 2
    assert bench.started[0].poll() is None
    bench.look_for(20.0)  # the second one starts, and waits for its turn
    assert len(bench.started) == 2
    bench.hold()
    bench.look_for(20.0, renewing=True)
    assert len(bench.started) == 2
    bench.started[0].kill()
    bench.started[0].wait()
    bench.look_for(1.0, renewing=True)
    assert [process.pid for process in bench.keeper.processes()] == [bench.started[1].pid]


def test_coordinators_that_end_again_and_again_without_a_new_step_fail_the_job(bench: Bench) -> None:
    with pytest.raises(JobFailedError, match=rf"started {MAX_STARTS} times without a new step; the last one"):
        bench.kill_all(MAX_STARTS)
    assert len(bench.started) == MAX_STARTS


def test_new_step_gives_the_coordinator_all_its_starts_again(bench: Bench) -> None:
    for step in range(2 * MAX_STARTS):
        bench.keeper.note_step(step)
        bench.kill()
        bench.look_for(6.0)
    assert len(bench.started) == 2 * MAX_STARTS + 1


def test_step_that_is_not_new_does_not(bench: Bench) -> None:
    bench.keeper.note_step(3)
    with pytest.raises(JobFailedError):
        bench.kill_all(MAX_STARTS, step=3)


def test_coordinator_killed_after_the_end_of_a_run_is_started_again_but_not_for_ever(bench: Bench) -> None:
    assert bench.keeper.stay()
    assert len(bench.started) == 1
    for num in range(2, MAX_STARTS + 1):
        bench.kill()
        assert bench.keeper.stay()
        assert len(bench.started) == num
    bench.kill()
    assert not bench.keeper.stay()
