"""Faults as data: what a command line means, and when an armed fault fires."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.faults import Fault, parse_fault, parse_faults
from chaos.injectors import ArmedFaults
from elastic.records import FaultInjected, StepCommitted, WorldFormed
from reshard.errors import UsageError

WORLD = WorldFormed(
    unix_s=0.0, generation=1, slices=(0, 1), mode="first", restored_step=None, newest_committed=-1,
    lost=(), joined=(), bytes_moved=0, bytes_lower_bound=0, explanation="",
)  # fmt: skip


def committed(step: int) -> StepCommitted:
    return StepCommitted(
        unix_s=0.0, generation=1, slice_index=0, step=step, position=0, sample_ids=(), loss=None,
        step_s=0.001, stall_s=0.0, captured_bytes=0,
    )  # fmt: skip


class OneWorker:
    """A real process to aim at."""

    hosts_per_slice = 1

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        self.noted: list[FaultInjected] = []

    def worker_pid(self, slice_index: int) -> int | None:
        return self.pid

    def agent_pid(self, slice_index: int) -> int | None:
        return None

    def arena(self, slice_index: int) -> Path:
        return Path("/nonexistent")

    def note(self, fault: FaultInjected) -> None:
        self.noted.append(fault)


class Hosts(OneWorker):
    """Slices of two hosts."""

    hosts_per_slice = 2

    def __init__(self) -> None:
        super().__init__(os.getpid())
        self.asked: list[int] = []

    def worker_pid(self, member: int) -> int | None:
        self.asked.append(member)
        return self.pid


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


@pytest.mark.parametrize(
    "text",
    [
        "kill:slice=1@step=60",
        "stop:slice=0+2@step=0",
        "host:slice=1@phase=FENCING",
        "kill:slice=1,host=1@step=60",
    ],
)
def test_fault_prints_as_it_was_written(text: str) -> None:
    assert str(parse_fault(text, 3, 2)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", "is no fault"),
        ("kill:slice=3@step=1", "there is no slice 3"),
        ("kill:slice=1,host=1@step=1", "there is no host 1"),
        ("melt:slice=1@step=1", "no fault is called 'melt'"),
        ("kill:slice=1@step=soon", "is no step"),
        ("kill:slice=1@phase=LUNCH", "no phase is called 'LUNCH'"),
    ],
)
def test_fault_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_fault(text, 3)


def test_none_means_no_fault() -> None:
    assert parse_faults(["none"], 3) == ()


def test_kill_kills_once_its_step_runs_and_not_before(process: subprocess.Popen[bytes]) -> None:
    targets = OneWorker(process.pid)
    armed = ArmedFaults([Fault(kind="kill", slices=(0,), step=5)], targets, seed=1)
    armed.feed(WORLD)
    armed.feed(committed(3))
    assert process.poll() is None
    armed.feed(committed(4))
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_stop_stops(process: subprocess.Popen[bytes]) -> None:
    armed = ArmedFaults([Fault(kind="stop", slices=(0,), step=1)], OneWorker(process.pid), seed=1)
    armed.feed(WORLD)
    armed.feed(committed(0))
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP


def test_fault_that_hits_nothing_is_not_noted() -> None:
    targets = OneWorker(None)
    armed = ArmedFaults([], targets, seed=1)
    armed._inject(Fault(kind="kill", slices=(0,), step=1))
    assert targets.noted == []


@pytest.mark.parametrize(("host", "hit"), [(None, [(0, 0), (0, 1), (2, 0), (2, 1)]), (1, [(0, 1), (2, 1)])])
def test_fault_of_a_slice_hits_all_of_its_hosts_or_the_one_named(
    monkeypatch: pytest.MonkeyPatch, host: int | None, hit: list[tuple[int, int]]
) -> None:
    targets = Hosts()
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    ArmedFaults([], targets, seed=1)._inject(Fault(kind="kill", slices=(0, 2), host=host, step=1))
    assert [(fault.slice_index, fault.host_index) for fault in targets.noted] == hit
    assert targets.asked == [2 * index + host for index, host in hit]
