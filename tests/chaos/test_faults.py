"""Faults as data: what a command line means, and when an armed fault fires."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from chaos.catalogue import KINDS, ROLES
from chaos.course import Course
from chaos.faults import parse_fault, parse_faults
from chaos.injectors import ArmedFaults
from elastic.records import (
    FaultInjected,
    FaultMissed,
    PhaseEntered,
    RunStarted,
    StepCommitted,
    WorkerEvent,
    WorldFormed,
)
from elastic.worker_process import is_stopped, start_time
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


class OneProcess:
    """A real process to aim at, in the part that a test gives it."""

    hosts_per_slice = 1

    def __init__(self, pid: int | None, role: str = "slice", arena: Path = Path("/nonexistent")) -> None:
        self.pids = {role: pid}
        self.noted: list[FaultInjected] = []
        self.is_deaf = False
        self._arena = arena

    def worker_pid(self, slice_index: int) -> int | None:
        return self.pids.get("slice")

    def agent_pid(self, slice_index: int) -> int | None:
        return self.pids.get("agent")

    def spare_pid(self, slice_index: int) -> int | None:
        return self.pids.get("spare")

    def coordinator_pid(self) -> int | None:
        return self.pids.get("coordinator")

    def service_pid(self) -> int | None:
        return self.pids.get("service")

    def arena(self, slice_index: int) -> Path:
        return self._arena

    def note(self, fault: FaultInjected) -> None:
        if self.is_deaf:
            raise ConnectionError("no coordinator")
        self.noted.append(fault)


class Hosts(OneProcess):
    """Slices of two hosts."""

    hosts_per_slice = 2

    def __init__(self) -> None:
        super().__init__(os.getpid())
        self.asked: list[int] = []

    def worker_pid(self, member: int) -> int | None:
        self.asked.append(member)
        return self.pids["slice"]


def phase(name: str) -> PhaseEntered:
    return PhaseEntered(unix_s=0.0, generation=1, phase=name)


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
        "stop:agent=0+1,host=0@phase=FENCING,nth=2,heal=1.5",
        "term:agent=1@step=60",
        "kill:spare=2@step=60",
        "kill:coordinator@step=60",
        "stop:service@phase=REPLAYING,nth=2,heal=1.5",
        "kill:slice=1@phase=JOINING",
        "kill:slice=1@step=3,round=2",
        "kill:slice=1@phase=FENCING,nth=1,round=2",
    ],
)
def test_fault_prints_as_it_was_written(text: str) -> None:
    assert str(parse_fault(text, 3, 2)) == text


def test_old_way_to_write_the_death_of_an_agent_still_means_it() -> None:
    assert str(parse_fault("agent:slice=1@step=60", 3)) == "kill:agent=1@step=60"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", "is no fault"),
        ("kill:slice=3@step=1", "there is no slice 3"),
        ("kill:slice=1,host=1@step=1", "there is no host 1"),
        ("kill:agent=3@step=1", "there is no slice 3"),
        ("melt:slice=1@step=1", "no fault is called 'melt'"),
        ("kill:pilot@step=1", "nobody is called 'pilot'"),
        ("kill:slice=1@step=soon", "is no step"),
        ("kill:slice=1@phase=LUNCH", "no phase is called 'LUNCH'"),
        ("kill:slice@step=1", "which slice"),
        ("kill:coordinator=1@step=1", "which slice"),
        ("host:agent=1@step=1", "host strikes slice, not agent"),
        ("kill:slice=1@step=1,heal=2", "kill cannot be healed"),
        ("stop:slice=1@step=1,heal=0", "heals after more than 0 s"),
        ("stop:slice=1@step=1,heal=x.y", "'x.y' is no value for heal"),
        ("kill:slice=1@step=1,nth=2", "nth= is for phases"),
        ("kill:slice=1@phase=FENCING,nth=0", "count from 1"),
        ("kill:slice=1@step=1,round=0", "rounds count from 1"),
        ("kill:slice=1@step=1,often=2", "no option is called 'often'"),
    ],
)
def test_fault_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_fault(text, 3)


def test_none_means_no_fault() -> None:
    assert parse_faults(["none"], 3) == ()


def test_catalogue_says_of_each_kind_what_it_does_and_how_it_heals() -> None:
    for name, kind in KINDS.items():
        assert (kind.name, bool(kind.does), bool(kind.heals), bool(kind.needs)) == (name, True, True, True)
        assert set(kind.roles) <= set(ROLES)


RECOVERY = ("FENCING", "PLANNING", "REBUILDING", "REPLAYING", "RUNNING")
STARTED = RunStarted(
    unix_s=0.0, run_id="r", adapter="a", in_place="no", simulated_faults=False, slices=2, min_slices=1,
    devices_per_host=1, replicas=2, seed=0, target_steps=None,
)  # fmt: skip


def arm(text: str, targets: OneProcess) -> ArmedFaults:
    armed = ArmedFaults([parse_fault(text, 3)], targets, seed=1)
    armed.feed(STARTED)
    armed.feed(WORLD)
    return armed


def test_kill_kills_once_its_step_runs_and_not_before(process: subprocess.Popen[bytes]) -> None:
    armed = arm("kill:slice=0@step=5", OneProcess(process.pid))
    armed.feed(committed(3))
    assert process.poll() is None
    armed.feed(committed(4))
    assert process.wait(timeout=10) == -signal.SIGKILL


@pytest.mark.parametrize("target", ["slice=0", "agent=0", "spare=0", "coordinator", "service"])
def test_signal_goes_to_the_one_that_was_named(process: subprocess.Popen[bytes], target: str) -> None:
    targets = OneProcess(process.pid, target.partition("=")[0])
    arm(f"term:{target}@step=1", targets).feed(committed(0))
    assert process.wait(timeout=10) == -signal.SIGTERM
    wait_until(lambda: targets.noted)
    assert targets.noted[0].slice_index == (0 if "=" in target else None)


def test_stop_stops_and_is_healed_after_its_time(process: subprocess.Popen[bytes]) -> None:
    armed = arm("stop:slice=0@step=1,heal=600", OneProcess(process.pid))
    armed.feed(committed(0))
    wait_until(lambda: is_stopped(process.pid))
    armed.close()  # what is left to heal is healed at the end
    wait_until(lambda: not is_stopped(process.pid))


def test_stop_without_healing_stays(process: subprocess.Popen[bytes]) -> None:
    armed = arm("stop:slice=0@step=1", OneProcess(process.pid))
    armed.feed(committed(0))
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    armed.close()
    assert is_stopped(process.pid)


def test_host_takes_the_processes_below_it_and_its_memory_along(tmp_path: Path) -> None:
    arena = tmp_path / "arena"
    arena.mkdir()
    command = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    agent = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    below = int(agent.stdout.readline())
    arm("host:slice=0@step=1", OneProcess(agent.pid, "agent", arena)).feed(committed(0))
    assert agent.wait(timeout=10) == -signal.SIGKILL
    wait_until(lambda: not arena.exists())
    wait_until(lambda: start_time(below) == -1 or b"sleep" not in Path(f"/proc/{below}/cmdline").read_bytes())
    agent.communicate()


def test_fault_at_a_phase_waits_for_a_recovery_and_counts_them(process: subprocess.Popen[bytes]) -> None:
    armed = arm("kill:slice=0@phase=REBUILDING,nth=2", OneProcess(process.pid))
    for name in [*RECOVERY, "SUSPECT", *RECOVERY]:
        armed.feed(phase(name))
    assert process.poll() is None
    armed.feed(phase("FENCING"))
    armed.feed(phase("REBUILDING"))
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_fault_of_a_round_waits_until_all_slices_are_back(process: subprocess.Popen[bytes]) -> None:
    armed = arm("kill:slice=0@step=1,round=2", OneProcess(process.pid))
    for name in RECOVERY:
        armed.feed(phase(name))
    for step in range(4):
        armed.feed(committed(step))
    smaller = dataclasses.replace(WORLD, slices=(0,), mode="in-place")
    for world, first in ((smaller, 4), (WORLD, 8)):
        armed.feed(phase("FENCING"))
        armed.feed(world)
        armed.feed(phase("REPLAYING"))
        armed.feed(committed(first))
        armed.feed(phase("RUNNING"))
        assert process.poll() is None
    armed.feed(committed(9))
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_joiner_is_struck_once_it_has_been_started(process: subprocess.Popen[bytes]) -> None:
    armed = arm("kill:slice=1@phase=JOINING", OneProcess(process.pid))
    started = WorkerEvent(unix_s=0.0, generation=1, slice_index=1, state="started")
    armed.feed(started)  # the first start of all is no joining
    armed.feed(committed(0))
    armed.feed(dataclasses.replace(started, slice_index=2))
    assert process.poll() is None
    armed.feed(started)
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_fault_that_hits_nothing_is_told_as_missed() -> None:
    targets = OneProcess(None)
    armed = arm("kill:slice=0@step=1", targets)
    armed.feed(committed(0))
    found: list[object] = []
    wait_until(lambda: found.extend(armed.close()) or found)
    (missed,) = found
    assert isinstance(missed, FaultMissed)
    assert (missed.detail, missed.why) == ("kill:slice=0@step=1", "there was no slice 0 at its moment")
    assert targets.noted == []


@pytest.mark.parametrize(
    ("written", "hit"),
    [
        ("kill:slice=0+2@step=1", [(0, 0), (0, 1), (2, 0), (2, 1)]),
        ("kill:slice=0+2,host=1@step=1", [(0, 1), (2, 1)]),
    ],
)
def test_fault_of_a_slice_hits_all_of_its_hosts_or_the_one_named(
    monkeypatch: pytest.MonkeyPatch, written: str, hit: list[tuple[int, int]]
) -> None:
    targets = Hosts()
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda process, number: None)
    ArmedFaults([], targets, seed=1)._inject(parse_fault(written, 3, 2), 0.0)
    assert [(fault.slice_index, fault.host_index) for fault in targets.noted] == hit
    assert targets.asked == [2 * index + host for index, host in hit]


def test_fault_that_misses_one_host_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = Hosts()
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda process, number: None)
    monkeypatch.setattr(targets, "worker_pid", lambda member: os.getpid() if member == 2 else None)
    armed = ArmedFaults([], targets, seed=1)
    armed._inject(parse_fault("kill:slice=1@step=1", 3, 2), 0.0)
    (missed,) = armed.close()
    assert isinstance(missed, FaultMissed)
    assert missed.why == "there was no slice 1 host 1 at its moment"


def test_fault_of_a_joining_host_waits_for_that_host() -> None:
    fault = parse_fault("kill:slice=1,host=1@phase=JOINING", 3, 2)
    course = Course()
    course.take(committed(3))
    started = [
        WorkerEvent(unix_s=0.0, generation=2, slice_index=1, host_index=host, state="started")
        for host in (0, 1)
    ]
    moments = [course.take(record) for record in started]
    assert [moment is not None and moment.is_for(fault) for moment in moments] == [False, True]


def test_fault_whose_moment_never_came_is_told_as_missed() -> None:
    armed = arm("kill:slice=0@step=50", OneProcess(None))
    armed.feed(committed(3))
    (missed,) = armed.close()
    assert isinstance(missed, FaultMissed)
    assert missed.why == "the run ended before its moment came"


def test_fault_is_noted_as_soon_as_somebody_listens(process: subprocess.Popen[bytes]) -> None:
    targets = OneProcess(process.pid, "coordinator")
    targets.is_deaf = True
    armed = arm("kill:coordinator@step=1", targets)
    armed.feed(committed(0))
    process.wait(timeout=10)
    assert targets.noted == []
    targets.is_deaf = False
    wait_until(lambda: targets.noted)
    assert armed.close() == []


def test_fault_that_nobody_could_note_is_told_at_the_end(process: subprocess.Popen[bytes]) -> None:
    targets = OneProcess(process.pid, "coordinator")
    targets.is_deaf = True
    armed = arm("kill:coordinator@step=1", targets)
    armed.feed(committed(0))
    process.wait(timeout=10)
    found: list[object] = []
    wait_until(lambda: found.extend(armed.close()) or found)
    assert [type(record) for record in found] == [FaultInjected]
