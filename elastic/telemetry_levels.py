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

    _hosts: dict[tuple[int, int], str] = field(default_factory=dict)
    """By slice and host in it: one of SLICE_STATES."""
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
            hosts = range(record.hosts_per_slice)
            self._hosts = {(index, host): "away" for index in range(record.slices) for host in hosts}
        elif isinstance(record, WorkerEvent):
            host = (record.slice_index, record.host_index)
            self._hosts[host] = _BY_EVENT.get(record.state, self._hosts.get(host, "away"))
        elif isinstance(record, WorldFormed):
            left = {host: "away" if state == "training" else state for host, state in self._hosts.items()}
            training = {host for host in left if host[0] in record.slices} | {
                (index, 0) for index in record.slices
            }
            self._hosts = left | dict.fromkeys(training, "training")
            if record.mode == "rehearsal":
                self._rehearsals.add(record.generation)
        elif isinstance(record, PhaseEntered):
            self._enter(record)
        elif isinstance(record, StepCommitted) and self._began_unix_s is not None:
            key = (record.generation, record.step)
            if key > self._stalled:  # each slice tells of each step; the loop stood still once
                self._stalled, self._stall_s = key, self._stall_s + record.stall_s

    def _enter(self, record: PhaseEntered) -> None:
        if self._began_unix_s is None:
            if record.phase == "RUNNING" and record.generation not in self._rehearsals:
                self._began_unix_s = record.unix_s
        elif self._phase != "RUNNING":
            self._outside_s += record.unix_s - self._phase_unix_s
        self._phase, self._phase_unix_s = record.phase, record.unix_s

    @property
    def states(self) -> dict[int, str]:
        """Each slice's state: that of the host of it that is furthest from training."""
        found: dict[int, str] = {}
        for (index, _), state in self._hosts.items():
            found[index] = max(found.get(index, state), state, key=SLICE_STATES.index)
        return found

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
