"""What a live view knows of a running job: the newest facts of its history, kept up record by record."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from elastic.history_text import describe, format_seconds, format_slices
from elastic.records import (
    CorruptionSuspected,
    FaultInjected,
    LossDetected,
    PersistFailed,
    PhaseEntered,
    Record,
    RunEnded,
    RunStarted,
    SnapshotPersisted,
    SnapshotRejected,
    SnapshotsVerified,
    StepCommitted,
    WorkerEvent,
    WorldFormed,
)

_WINDOW_STEPS = 20
_GONE = ("lost", "ended", "failed")
_WAITING = ("ready", "unwound", "adopted")


@dataclass(slots=True, kw_only=True)
class SliceView:
    """One slice: what its worker last did (those of its hosts, where it has several), and how far it is."""

    state: str = "waiting"
    pid: int = 0
    step: int | None = None
    hosts: dict[int, str] = field(default_factory=dict)

    def note(self, host_index: int, state: str) -> None:
        """A host's worker has done something. Healthy hosts of a slice that is lost are its spares."""
        self.hosts[host_index] = state
        is_lost = any(each in _GONE for each in self.hosts.values())
        told = {
            host: "spare" if is_lost and each in _WAITING else each
            for host, each in sorted(self.hosts.items())
        }
        same = len(set(told.values())) == 1
        self.state = state if same else ", ".join(f"host {host} {each}" for host, each in told.items())


@dataclass(slots=True, kw_only=True)
class JobView:
    """The newest facts. `feed` takes each record once, in order; it is cheap."""

    run_id: str = ""
    started_unix_s: float | None = None
    target_steps: int | None = None
    slices: dict[int, SliceView] = field(default_factory=dict)
    phase: str = "starting"
    generation: int = 0
    world: tuple[int, ...] = ()
    newest_step: int | None = None
    committed: int = 0
    loss: float | None = None
    snapshots: int = 0
    verified: int = 0
    rejected: int = 0
    persisted_step: int | None = None
    persist_failed: int = 0
    corruption: str = ""
    """The newest finding of silent corruption, empty without one."""
    recoveries: int = 0
    last_recovery: str = ""
    outcome: str = ""
    now_unix_s: float = 0.0
    _rehearsals: set[int] = field(default_factory=set)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS + 1))
    _trouble_unix_s: float | None = None
    _recovering: WorldFormed | None = None
    _faults: dict[int, float] = field(default_factory=dict)

    @property
    def steps_per_s(self) -> float | None:
        """Committed steps a second over the last few; None before there are two."""
        if len(self._recent) < 2 or self._recent[-1] <= self._recent[0]:
            return None
        return (len(self._recent) - 1) / (self._recent[-1] - self._recent[0])

    @property
    def elapsed_s(self) -> float:
        """Time from the start of the run to its newest record."""
        return 0.0 if self.started_unix_s is None else max(0.0, self.now_unix_s - self.started_unix_s)

    def feed(self, record: Record) -> str:
        """Take in a record; return a sentence if a recovery is over with it, else nothing."""
        self.now_unix_s = max(self.now_unix_s, record.unix_s)
        match record:
            case RunStarted():
                self.run_id, self.started_unix_s = record.run_id, record.unix_s
                self.target_steps = record.target_steps
                self.slices = {index: SliceView() for index in range(record.slices)}
            case FaultInjected():
                if record.slice_index is not None:
                    self._note_fault(record.slice_index, record.unix_s)
            case LossDetected():
                self._slice(record.slice_index).note(record.host_index, "lost")
                self._note_trouble(self._faults.pop(record.slice_index, record.last_life_unix_s))
            case PhaseEntered():
                self.phase = record.phase
                if record.phase == "FENCING":
                    self._note_trouble(record.unix_s)
            case WorkerEvent():
                view = self._slice(record.slice_index)
                view.note(record.host_index, record.state)
                view.pid = record.pid or view.pid
            case WorldFormed():
                self._form(record)
            case StepCommitted():
                return self._commit(record)
            case SnapshotRejected():
                self.rejected += 1
            case SnapshotsVerified():
                self.verified += 1
            case SnapshotPersisted():
                self.persisted_step = record.step
            case PersistFailed():
                self.persist_failed += 1
            case CorruptionSuspected():
                self.corruption = describe(record)
            case RunEnded():
                self.outcome, self.phase = record.outcome, record.outcome.upper()
        return ""

    def _slice(self, index: int) -> SliceView:
        return self.slices.setdefault(index, SliceView())

    def _note_trouble(self, unix_s: float) -> None:
        if self._trouble_unix_s is None:
            self._trouble_unix_s = unix_s

    def _note_fault(self, slice_index: int, unix_s: float) -> None:
        """The word of a fault may come after its detection."""
        if self._trouble_unix_s is not None and "lost" in self._slice(slice_index).hosts.values():
            self._trouble_unix_s = min(self._trouble_unix_s, unix_s)
        else:
            self._faults[slice_index] = unix_s

    def _form(self, record: WorldFormed) -> None:
        if record.mode == "rehearsal":
            self._rehearsals.add(record.generation)
            return
        if record.mode == "first":
            self.committed = 0 if record.restored_step is None else record.restored_step + 1
            self._trouble_unix_s = None
        else:
            self._recovering = record
        self.generation, self.world = record.generation, record.slices
        self._recent.clear()

    def _commit(self, record: StepCommitted) -> str:
        if record.generation in self._rehearsals:
            return ""
        view = self._slice(record.slice_index)
        view.note(record.host_index, "training")
        view.step = record.step
        self.snapshots += record.captured_bytes > 0
        is_new = self.newest_step is None or record.step > self.newest_step
        if not is_new:
            return ""
        self.committed += 1
        self.newest_step, self.loss = record.step, record.loss
        self._recent.append(record.unix_s)
        return self._finish_recovery(record)

    def _finish_recovery(self, record: StepCommitted) -> str:
        world, trouble = self._recovering, self._trouble_unix_s
        if world is None:
            return ""
        self.recoveries += 1
        took = "" if trouble is None else f" in {format_seconds(record.unix_s - trouble)}"
        self.last_recovery = f"{world.mode}{took}: {format_slices(world.slices)} from step {record.step}"
        self._recovering = self._trouble_unix_s = None
        return f"recovered {self.last_recovery}"
