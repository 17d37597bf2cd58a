"""The course of a run, as far as faults are timed by it: its steps, recoveries and rounds so far."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults import JOINING, AtPhase, AtStep, Fault
from elastic.records import PhaseEntered, Record, RunStarted, StepCommitted, WorkerEvent, WorldFormed
from reshard.ids import HostId

JOINING_S = 2.0
"""A joining worker is struck within so long of its start: while it imports, connects, or is just ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What has just happened: a step begins, a phase was entered, or a worker started to join.

    What strikes at it does so within `within_s`. Numbers of steps and recoveries are those of the run, and
    since the present round began.
    """

    round: int
    step: int | None = None
    step_of_round: int = 0
    phase: str = ""
    nth: int = 0
    nth_of_round: int = 0
    joiner: HostId | None = None
    within_s: float = 0.0

    def is_for(self, fault: Fault) -> bool:
        """Whether it is this fault's moment, or its moment has passed meanwhile."""
        at = fault.at
        if at.round is not None and at.round > self.round:
            return False
        if isinstance(at, AtStep):
            reached = self.step if at.round is None else self.step_of_round
            return self.step is not None and reached is not None and at.step <= reached
        return self._is_phase(at) and (self.joiner is None or _strikes(fault, self.joiner))

    def _is_phase(self, at: AtPhase) -> bool:
        nth = self.nth if at.round is None else self.nth_of_round
        return at.phase == self.phase and at.nth in (None, nth)


def _strikes(fault: Fault, host: HostId) -> bool:
    return host.slice_index in fault.slices and fault.host in (None, host.host_index)


class Course:
    """Fed with the records of a run, one after the other; says what moment each of them is."""

    def __init__(self) -> None:
        self._num_slices = 0
        self._is_real = False
        self._is_whole = False
        self._is_running = False
        self._step_s = 0.0
        self._newest = -1
        self._recoveries = 0
        self._round = 0
        self._round_step = 0
        self._round_recoveries = 0

    def take(self, record: Record) -> Moment | None:
        """The moment that this record stands for, None for none."""
        if isinstance(record, RunStarted):
            self._num_slices = record.slices
        elif isinstance(record, WorldFormed):
            self._is_real = record.mode != "rehearsal"
            self._is_whole = len(record.slices) == self._num_slices
        elif isinstance(record, StepCommitted):
            self._step_s = record.step_s
            self._newest = max(self._newest, record.step)
            return self._moment(step=record.step + 1, within_s=record.step_s)
        elif isinstance(record, PhaseEntered) and self._is_real:
            return self._enter(record.phase)
        elif isinstance(record, WorkerEvent) and record.state == "started" and self._newest >= 0:
            return self._moment(
                phase=JOINING, joiner=HostId(record.slice_index, record.host_index), within_s=JOINING_S
            )
        return None

    def _enter(self, phase: str) -> Moment | None:
        if phase == "RUNNING" and not self._is_running:
            self._is_running = True
            if self._is_whole:
                self._round += 1
                self._round_step = self._newest + 1
                self._round_recoveries = self._recoveries
        elif phase in ("SUSPECT", "FENCING") and self._is_running:
            self._is_running = False
            self._recoveries += 1
        if phase == "REPLAYING" and self._newest < 0:
            return self._moment(step=0)
        return self._moment(phase=phase) if self._recoveries else None

    def _moment(
        self, *, step: int | None = None, phase: str = "", joiner: HostId | None = None, within_s: float = 0.0
    ) -> Moment:
        return Moment(
            round=self._round,
            step=step,
            step_of_round=0 if step is None else step - self._round_step,
            phase=phase,
            nth=self._recoveries,
            nth_of_round=self._recoveries - self._round_recoveries,
            joiner=joiner,
            within_s=within_s,
        )
