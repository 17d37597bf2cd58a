"""The network breaks in two: one side goes on, the other stops itself and comes back as new when healed.

Each slice is a host of its own, a network namespace; a cut loses packets without a word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_jobs import assert_survived, launch, run_with, wait_records
from real_runs import Run, finish

import snapshot
from chaos.namespaces import HUB, NamespaceNet, what_is_missing
from elastic.records import LossDetected, Record, StepCommitted, WorkerEvent, WorldFormed, of_kind
from elastic.worker_process import start_time

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing()),
]

BOUND_S = 300.0
LEASE_S = 10.0
HELD_UP_S = 6.0
CUT_STEPS = 20
"""Paced as they are, these steps take longer than an agent may be away, and less than the lease."""


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final state of an undisturbed run, whatever its number of slices: its sums are exact."""
    run = run_with(tmp_path_factory.mktemp("calm"), [], slices=2)
    assert run.status == 0, run.output
    return run.report.final.state_digest


@pytest.fixture
def net() -> Iterator[NamespaceNet]:
    with NamespaceNet(f"eft{os.getpid() % 100000}", 3) as made:
        yield made


class Job:
    """A running job on the hosts of a net, and how far it has come."""

    def __init__(self, net: NamespaceNet, tmp_path: Path, slices: int, *options: str) -> None:
        where = ("--bind-host", net.address(HUB), "--agent-bind-host", net.agent_bind_host)
        self.slices = slices
        self._process, self.directory, self._watch = launch(
            tmp_path,
            [],
            *where,
            *("--host-prefix", net.host_prefix, "--lease-s", str(LEASE_S), *options),
            slices=slices,
            prefix=net.hub_prefix,
            watched=False,
        )

    def wait(self, condition: Callable[[list[Record]], object]) -> list[Record]:
        return wait_records(self.directory, condition, BOUND_S)

    def wait_steps(self, num: int = 5) -> list[Record]:
        """Wait for so many more steps than there are now."""
        now = newest(self.wait(lambda records: records))
        return self.wait(lambda records: newest(records) >= now + num)

    def captured_step(self) -> int:
        """The newest step that the hosts' memory holds, whatever the coordinator has heard of it."""
        with snapshot.open(self.directory) as view:
            return int(view.step)

    def wait_held_up(self, for_s: float) -> None:
        """Wait until no step has been made for so long."""
        step, since_s = self.captured_step(), time.monotonic()

        def is_held_up(_: list[Record]) -> bool:
            nonlocal step, since_s
            if (now := self.captured_step()) != step:
                step, since_s = now, time.monotonic()
            return time.monotonic() - since_s >= for_s

        self.wait(is_held_up)

    def finish(self) -> Run:
        self._watch.over.touch()
        try:
            return finish(self._process, self.directory, timeout_s=BOUND_S)
        finally:
            self._watch.close()


def newest(records: list[Record]) -> int:
    return max((record.step for record in of_kind(records, StepCommitted)), default=-1)


def worker_pid(records: list[Record], index: int) -> int:
    return [e.pid for e in of_kind(records, WorkerEvent) if e.slice_index == index and e.state == "ready"][-1]


def is_whole(records: list[Record], slices: int) -> bool:
    return len(of_kind(records, WorldFormed)[-1].slices) == slices


@pytest.mark.parametrize(("slices", "cut_off"), [(3, 1), (2, 0)])
@pytest.mark.family("partition")
def test_slice_cut_off_stops_itself_and_comes_back_as_new_while_the_others_go_on(
    net: NamespaceNet, tmp_path: Path, digests: str, slices: int, cut_off: int
) -> None:
    job = Job(net, tmp_path, slices)
    records = job.wait_steps()
    pid = worker_pid(records, cut_off)
    net.cut_off([cut_off])
    records = job.wait(lambda records: of_kind(records, LossDetected))
    (loss,) = of_kind(records, LossDetected)
    assert (loss.slice_index, loss.detector) == (cut_off, "agent-heartbeat")
    job.wait_steps()
    job.wait(lambda _: start_time(pid) == -1)  # nobody could tell it: its lease has run out
    assert not is_whole(job.wait_steps(1), slices)
    net.heal()
    records = job.wait(lambda records: is_whole(records, slices))
    job.wait_steps()
    assert worker_pid(records, cut_off) != pid
    assert_survived(job.finish(), digests)


@pytest.mark.family("partition")
def test_cut_between_two_workers_holds_the_step_up_and_costs_nothing_once_healed(
    net: NamespaceNet, tmp_path: Path, digests: str
) -> None:
    job = Job(net, tmp_path, 3)
    job.wait_steps()
    net.cut(1, 2)
    job.wait_held_up(HELD_UP_S)
    net.heal()
    job.wait_steps()
    job.wait(lambda records: is_whole(records, 3))
    assert_survived(job.finish(), digests)


@pytest.mark.family("partition")
def test_coordinator_out_of_everybodys_reach_for_less_than_the_lease_stops_no_training(
    net: NamespaceNet, tmp_path: Path, digests: str
) -> None:
    job = Job(net, tmp_path, 3)
    job.wait_steps()
    before = job.captured_step()
    net.cut_off([HUB])
    job.wait(lambda _: job.captured_step() > before + CUT_STEPS)
    heard = newest(job.wait(lambda records: records))
    assert heard < job.captured_step() - CUT_STEPS // 2  # the coordinator knows nothing of it
    net.heal()
    job.wait_steps()
    run = job.finish()
    assert_survived(run, digests)
    assert of_kind(run.records, LossDetected) == []
    assert run.report.recoveries == ()
