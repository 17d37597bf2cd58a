"""Armed faults: fed with the run's history, each strikes once, at its moment, and is written down."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from chaos.course import Course
from chaos.faults import JOINING, AtPhase, Fault, parse_faults
from chaos.signals import Heal, strike
from chaos.targets import SimulatedTargets, Targets
from elastic.records import FaultInjected, FaultMissed, Record
from reshard.ids import HostId

__all__ = ["ArmedFaults", "Injector", "SimulatedTargets", "Targets", "injector"]

NOTE_AGAIN_S = 0.2
FIND_S = 2.0
"""How long a target that is not there (a worker that is only just being started) is waited for."""


class ArmedFaults:
    """Faults waiting for their moment, as a listener of the run's history.

    A fault at a step strikes at a random moment (of the seed) while that step runs; one at a phase when the
    recovery enters it. `close` tells what has not struck.
    """

    poll_s = 0.005
    """How soon it wants to hear of a record: a phase, at which a fault is to strike, may be that short."""

    def __init__(self, faults: Sequence[Fault], targets: Targets | SimulatedTargets, seed: int) -> None:
        self._waiting = list(faults)
        self._targets = targets
        self._random = random.Random(seed)
        self._course = Course()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._told: list[FaultInjected | FaultMissed] = []
        """What could not be noted in the run's history (yet)."""

    def feed(self, record: Record) -> None:
        """Take in the next record of the history; let strike what is due."""
        moment = self._course.take(record)
        if moment is None:
            return
        for fault in [fault for fault in self._waiting if moment.is_for(fault)]:
            self._waiting.remove(fault)
            delay_s = self._random.random() * moment.within_s
            threading.Thread(target=self._inject, args=(fault, delay_s), name="fault", daemon=True).start()

    def close(self) -> list[FaultInjected | FaultMissed]:
        """The run is over: what is not in its history, to be written there. Nothing strikes from now on."""
        with self._lock:
            self._closed.set()
            missed = [
                FaultMissed(unix_s=time.time(), detail=str(fault), why="the run ended before its moment came")
                for fault in self._waiting
            ]
            self._waiting = []
            return [*self._told, *missed]

    def _inject(self, fault: Fault, delay_s: float) -> None:
        if delay_s:
            self._closed.wait(delay_s)
        heals: list[Heal] = []
        parts = _hosts(fault, 1)
        hit: list[HostId | None] = []
        unix_s = time.time()
        if isinstance(self._targets, SimulatedTargets):
            self._targets.simulate(fault.kind, fault.slices)
            hit = list(parts)
        else:
            parts = _hosts(fault, self._targets.hosts_per_slice)
            for part in parts:
                heal = self._strike(self._targets, fault, part)
                if heal is not None:
                    heals.append(heal)
                    hit.append(part)
        if fault.heal_s is not None and heals:
            threading.Thread(target=self._heal, args=(heals, fault.heal_s), daemon=True).start()
        for part in hit:
            self._note(
                FaultInjected(
                    unix_s=unix_s,
                    fault=fault.kind,
                    slice_index=None if part is None else part.slice_index,
                    host_index=0 if part is None else part.host_index,
                    detail=str(fault),
                )
            )
        if missed := [part for part in parts if part not in hit]:
            why = f"there was no {_name(fault, missed, parts)} at its moment"
            with self._lock:
                self._told.append(FaultMissed(unix_s=unix_s, detail=str(fault), why=why))

    def _strike(self, targets: Targets, fault: Fault, part: HostId | None) -> Heal | None:
        until_s = time.monotonic() + FIND_S
        while not self._closed.is_set():
            heal = strike(targets, fault, part)
            joins = isinstance(fault.at, AtPhase) and fault.at.phase == JOINING
            if heal is not None or not joins or time.monotonic() >= until_s:
                return heal
            self._closed.wait(0.02)  # its agent is only just starting it
        return None

    def _heal(self, heals: Sequence[Heal], after_s: float) -> None:
        self._closed.wait(after_s)  # a run that has ended meanwhile needs it no more; it does no harm
        for heal in heals:
            heal()

    def _note(self, fault: FaultInjected) -> None:
        """Have it written into the history: by the coordinator, as soon as there is one."""
        with self._lock:
            self._told.append(fault)
        while not self._closed.is_set():
            try:
                self._targets.note(fault)
            except Exception:  # whatever it is, the coordinator cannot be reached: it may be what was struck
                self._closed.wait(NOTE_AGAIN_S)
                continue
            with self._lock:
                if fault in self._told:
                    self._told.remove(fault)
            return


def _hosts(fault: Fault, hosts_per_slice: int) -> tuple[HostId | None, ...]:
    """The hosts that a fault is for; None stands for the one process that is of no slice."""
    hosts = range(hosts_per_slice) if fault.host is None else (fault.host,)
    return tuple(HostId(index, host) for index in fault.slices for host in hosts) or (None,)


def _name(fault: Fault, missed: Sequence[HostId | None], parts: Sequence[HostId | None]) -> str:
    """Whom a fault did not find: `slice 0+2`; `slice 0 host 1` where there are several, or one is named."""
    hosts = [part for part in missed if part is not None]
    if not hosts:
        return str(fault.role)
    slices = "+".join(str(index) for index in dict.fromkeys(host.slice_index for host in hosts))
    if fault.host is None and (len(hosts) == len(parts) or len(parts) == len(fault.slices)):
        return f"{fault.role} {slices}"
    return f"{fault.role} " + ", ".join(f"{host.slice_index} host {host.host_index}" for host in hosts)


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
