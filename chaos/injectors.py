"""Making faults happen to the processes of one job, and writing down when."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from chaos.faults import Fault, parse_faults
from elastic.members import member_of
from elastic.records import FaultInjected, PhaseEntered, Record, StepCommitted, WorldFormed
from reshard.ids import HostId


class Targets(Protocol):
    """What the injector may aim at: the processes and memory of one job, and nothing else.

    A member is a host's number (`elastic.members`).
    """

    @property
    def hosts_per_slice(self) -> int:
        """How many hosts each slice has."""
        ...

    def worker_pid(self, member: int) -> int | None:
        """The process of a host's worker, None if there is none."""
        ...

    def agent_pid(self, member: int) -> int | None:
        """The process of a host's agent, None if there is none."""
        ...

    def arena(self, member: int) -> Path:
        """The snapshot memory of a host."""
        ...

    def note(self, fault: FaultInjected) -> None:
        """Have a fault written into the history."""
        ...


@runtime_checkable
class SimulatedTargets(Protocol):
    """A job without processes to aim at: it makes faults happen to its virtual slices itself."""

    def simulate(self, kind: str, slices: tuple[int, ...]) -> None:
        """Let a fault happen to these slices at once."""
        ...

    def note(self, fault: FaultInjected) -> None:
        """Have a fault written into the history."""
        ...


class ArmedFaults:
    """Faults waiting for their moment: fed with the run's history, each fires once.

    A fault at a step fires at a random moment (of the seed) while that step runs; one at a phase when the
    recovery enters it.
    """

    def __init__(self, faults: Sequence[Fault], targets: Targets | SimulatedTargets, seed: int) -> None:
        self._waiting = list(faults)
        self._targets = targets
        self._random = random.Random(seed)
        self._real = False
        self._step_s = 0.0

    def feed(self, record: Record) -> None:
        """Take in the next record of the history; fire what is due."""
        if isinstance(record, WorldFormed):
            self._real = record.mode != "rehearsal"
        elif isinstance(record, StepCommitted):
            self._step_s = record.step_s
            self._fire(lambda fault: fault.step is not None and fault.step <= record.step + 1, delayed=True)
        elif isinstance(record, PhaseEntered) and self._real:
            if record.phase == "REPLAYING":
                self._fire(lambda fault: fault.step == 0, delayed=False)
            self._fire(lambda fault: fault.phase == record.phase and self._step_s > 0, delayed=False)

    def _fire(self, is_due: Callable[[Fault], bool], *, delayed: bool) -> None:
        for fault in [fault for fault in self._waiting if is_due(fault)]:
            self._waiting.remove(fault)
            delay_s = self._random.random() * self._step_s if delayed else 0.0
            timer = threading.Timer(delay_s, self._inject, args=(fault,))
            timer.daemon = True
            timer.start()

    def _inject(self, fault: Fault) -> None:
        unix_s = time.time()
        if isinstance(self._targets, SimulatedTargets):
            self._targets.simulate(fault.kind, fault.slices)
            hit = [HostId(index) for index in fault.slices]
        else:
            num = self._targets.hosts_per_slice
            hosts = range(num) if fault.host is None else (fault.host,)
            aimed_at = [HostId(index, host) for index in fault.slices for host in hosts]
            hit = [host for host in aimed_at if _ACTIONS[fault.kind](self._targets, member_of(host, num))]
        for host in hit:
            self._targets.note(
                FaultInjected(
                    unix_s=unix_s,
                    fault=fault.kind,
                    slice_index=host.slice_index,
                    host_index=host.host_index,
                    detail=str(fault),
                )
            )


def _signal(pid: int | None, number: signal.Signals) -> bool:
    """Whether there was a process to hit: one that has ended by itself makes the fault none."""
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _host(targets: Targets, member: int) -> bool:
    agent = _signal(targets.agent_pid(member), signal.SIGKILL)
    worker = _signal(targets.worker_pid(member), signal.SIGKILL)
    shutil.rmtree(targets.arena(member), ignore_errors=True)
    return agent or worker


_ACTIONS: dict[str, Callable[[Targets, int], bool]] = {
    "kill": lambda targets, index: _signal(targets.worker_pid(index), signal.SIGKILL),
    "stop": lambda targets, index: _signal(targets.worker_pid(index), signal.SIGSTOP),
    "term": lambda targets, index: _signal(targets.worker_pid(index), signal.SIGTERM),
    "agent": lambda targets, index: _signal(targets.agent_pid(index), signal.SIGKILL),
    "host": _host,
}


class Injector:
    """The entry point `elastic.injectors`: parses faults and arms them."""

    def parse(self, texts: Sequence[str], num_slices: int, hosts_per_slice: int = 1) -> tuple[Fault, ...]:
        """The faults of a command line. Raises UsageError."""
        return parse_faults(texts, num_slices, hosts_per_slice)

    def arm(self, faults: Sequence[Fault], targets: Targets | SimulatedTargets, seed: int) -> ArmedFaults:
        """Faults that wait for their moment."""
        return ArmedFaults(faults, targets, seed)


def injector() -> Injector:
    """The entry point."""
    return Injector()
