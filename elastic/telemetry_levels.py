"""What telemetry tells as levels: how many slices are in which state, and the goodput so far.

Pure: follows the history as it is written. The goodput is an estimate while the run goes on (the report's is
computed from the whole history): the part of the time since training began that was neither spent outside of
RUNNING nor held up by captures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.records import PhaseEntered, Record, RunStarted, StepCommitted, WorkerEvent, WorldFormed

SLICE_STATES = ("training", "ready", "starting", "away")
_BY_EVENT = {
    "started": "starting",
    "respawned": "starting",
    "ready": "ready",
    "ended": "away",
    "leaving": "away",
}


@dataclass(slots=True, kw_only=True)
class Levels:
    """`hear` takes each record once, in order."""

    states: dict[int, str] = field(default_factory=dict)
    """Each slice's state, one of SLICE_STATES."""
    _rehearsals: set[int] = field(default_factory=set)
    _began_unix_s: float | None = None
    _phase: str = ""
    _phase_unix_s: float = 0.0
    _outside_s: float = 0.0
    _stall_s: float = 0.0
    _stalled: tuple[int, int] = (-1, -1)
    _now_unix_s: float = 0.0

    def hear(self, record: Record) -> None:
        """Take in the next record."""
        self._now_unix_s = max(self._now_unix_s, record.unix_s)
        if isinstance(record, RunStarted):
            self.states = dict.fromkeys(range(record.slices), "away")
        elif isinstance(record, WorkerEvent):
            self.states[record.slice_index] = _BY_EVENT.get(record.state, self._state_of(record.slice_index))
        elif isinstance(record, WorldFormed):
            others = {index: state for index, state in self.states.items() if index not in record.slices}
            left = {index: "away" if state == "training" else state for index, state in others.items()}
            self.states = left | dict.fromkeys(record.slices, "training")
            if record.mode == "rehearsal":
                self._rehearsals.add(record.generation)
        elif isinstance(record, PhaseEntered):
            self._enter(record)
        elif isinstance(record, StepCommitted) and self._began_unix_s is not None:
            key = (record.generation, record.step)
            if key > self._stalled:  # each slice tells of each step; the loop stood still once
                self._stalled, self._stall_s = key, self._stall_s + record.stall_s

    def _state_of(self, slice_index: int) -> str:
        return self.states.get(slice_index, "away")

    def _enter(self, record: PhaseEntered) -> None:
        if self._began_unix_s is None:
            if record.phase == "RUNNING" and record.generation not in self._rehearsals:
                self._began_unix_s = record.unix_s
        elif self._phase != "RUNNING":
            self._outside_s += record.unix_s - self._phase_unix_s
        self._phase, self._phase_unix_s = record.phase, record.unix_s

    def counts(self) -> dict[str, int]:
        """How many slices are in each state."""
        return {state: list(self.states.values()).count(state) for state in SLICE_STATES}

    @property
    def goodput(self) -> float | None:
        """The part of the time so far that went into new steps; None before training began."""
        if self._began_unix_s is None:
            return None
        whole_s = self._now_unix_s - self._began_unix_s
        open_s = 0.0 if self._phase == "RUNNING" else self._now_unix_s - self._phase_unix_s
        if whole_s <= 0:
            return 1.0
        return min(1.0, max(0.0, 1.0 - (self._outside_s + open_s + self._stall_s) / whole_s))
