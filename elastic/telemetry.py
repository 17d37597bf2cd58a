"""Recoveries as OpenTelemetry traces and metrics. Without an exporter configured this costs next to nothing.

One trace a recovery: a span `elastic.recovery` from the detection to the first new step, a child span for
each phase. Metrics follow the names of the contracts; durations are in seconds.
"""

from __future__ import annotations

from opentelemetry import metrics, trace
from opentelemetry.trace import Span, set_span_in_context

from elastic.records import (
    CorruptionSuspected,
    FaultInjected,
    LossDetected,
    MessageRefused,
    PersistFailed,
    PhaseEntered,
    Record,
    RunEnded,
    SnapshotPersisted,
    SnapshotRejected,
    StateRestored,
    StepCommitted,
    StragglerOver,
    StragglerSeen,
    WorkerEvent,
    WorldFormed,
)
from elastic.telemetry_levels import Levels

RECOVERY_PHASES = ("SUSPECT", "FENCING", "PLANNING", "RESTORING", "REBUILDING", "REPLAYING")
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Boundaries of histograms: OpenTelemetry's own are meant for milliseconds."""
_NS = 1_000_000_000


class RecoveryTracer:
    """Turns the history, as it is written, into spans and metrics."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("elastic")
        meter = metrics.get_meter("elastic")
        self._measure_recoveries(meter)
        self._measure_snapshots(meter)
        self._recovery: Span | None = None
        self._phase: tuple[str, float, Span] | None = None
        self._cause = "none"
        self._newest_step = -1
        self._newest_of_world = (-1, -1)
        self._faults: dict[int, float] = {}
        """When a fault was injected into a slice, until it is detected."""
        self._levels = Levels()

    def _measure_recoveries(self, meter: metrics.Meter) -> None:
        self._duration = meter.create_histogram(
            "elastic.recovery.duration",
            unit="s",
            description="Duration of a recovery's phase.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._detect = meter.create_histogram(
            "elastic.detect.duration",
            unit="s",
            description="From a fault, or the last sign of life, to its detection.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._slices = meter.create_gauge(
            "elastic.slices", unit="{slice}", description="Slices by what their workers do."
        )
        self._goodput = meter.create_gauge(
            "elastic.goodput",
            unit="1",
            description="Part of the time since training began that made new steps.",
        )
        self._moved = meter.create_counter(
            "elastic.reshard.bytes", unit="By", description="Bytes that restores read, by tier."
        )
        self._slow = meter.create_gauge(
            "elastic.stragglers",
            unit="1",
            description="How many times the others' time a slow slice takes (0: well again).",
        )
        self._recoveries = meter.create_counter("elastic.recoveries", description="Recoveries by outcome.")
        self._steps = meter.create_counter("elastic.steps", description="Steps by kind.")
        self._generation = meter.create_gauge("elastic.generation", description="The job's generation.")
        self._refused = meter.create_counter(
            "elastic.refused", description="Messages and callers refused, by surface and reason."
        )

    def _measure_snapshots(self, meter: metrics.Meter) -> None:
        self._stall = meter.create_histogram(
            "elastic.snapshot.stall",
            unit="s",
            description="How long a capture held a worker's loop.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._captured = meter.create_counter(
            "elastic.snapshot.bytes", unit="By", description="Bytes captured into host memory."
        )
        self._rejected = meter.create_counter(
            "elastic.snapshot.rejected", description="Snapshots, or copies of shards, that were refused."
        )
        self._persisted = meter.create_counter(
            "elastic.snapshot.persisted", description="Snapshots for the persistent tier by outcome."
        )
        self._disagreements = meter.create_counter(
            "elastic.snapshot.disagreements",
            unit="{box}",
            description="Boxes of which copies on different slices or devices differ.",
        )

    def hear(self, record: Record) -> None:
        """Take in the next record of the history."""
        self._levels.hear(record)
        if isinstance(record, LossDetected):
            self._cause = record.detector
            fault_unix_s = self._faults.pop(record.slice_index, record.last_life_unix_s)
            attributes = {"detector": record.detector}
            self._detect.record(max(record.unix_s - fault_unix_s, 0.0), attributes)
        elif isinstance(record, FaultInjected):
            if record.slice_index is not None:
                self._faults[record.slice_index] = record.unix_s
        elif isinstance(record, StateRestored):
            for tier, num_bytes in record.bytes_from.items():
                self._moved.add(num_bytes, {"tier": tier})
        elif isinstance(record, StragglerSeen):
            self._slow.set(record.factor, {**_place(record), "where": record.where})
        elif isinstance(record, StragglerOver):
            self._slow.set(0.0, {**_place(record), "where": record.where})
        elif isinstance(record, WorldFormed) and self._recovery is not None:
            self._recovery.set_attribute("elastic.mode", record.mode)
            self._recovery.set_attribute("elastic.generation", record.generation)
        elif isinstance(record, PhaseEntered):
            self._enter(record)
        elif isinstance(record, SnapshotPersisted | PersistFailed):
            is_there = isinstance(record, SnapshotPersisted)
            self._persisted.add(1, {"outcome": "written" if is_there else "failed"})
        elif isinstance(record, CorruptionSuspected):
            self._disagreements.add(record.num_boxes, {"found_by": "audit" if record.is_audit else "capture"})
        elif isinstance(record, SnapshotRejected):
            self._rejected.add(1)
        elif isinstance(record, MessageRefused):
            self._refused.add(record.num, {"surface": record.surface, "reason": record.cause})
        elif isinstance(record, StepCommitted):
            self._hear_commit(record)
        elif isinstance(record, RunEnded):
            restorable = record.final_step if record.restorable_step is None else record.restorable_step
            if restorable < record.final_step:
                self._steps.add(record.final_step - restorable, {"kind": "lost"})
        if isinstance(record, WorkerEvent | WorldFormed | PhaseEntered):
            self._tell_levels()

    def _hear_commit(self, record: StepCommitted) -> None:
        if record.captured_bytes:
            self._stall.record(record.stall_s, {"slice": record.slice_index})
            self._captured.add(record.captured_bytes, {"slice": record.slice_index})
        if (record.generation, record.step) <= self._newest_of_world:
            return  # each slice tells of each step; it counts once
        self._newest_of_world = (record.generation, record.step)
        is_new = record.step > self._newest_step
        self._newest_step = max(self._newest_step, record.step)
        self._steps.add(1, {"kind": "committed" if is_new else "replayed"})
        self._tell_goodput()

    def _tell_levels(self) -> None:
        for state, count in self._levels.counts().items():
            self._slices.set(count, {"state": state})
        self._tell_goodput()

    def _tell_goodput(self) -> None:
        if (goodput := self._levels.goodput) is not None:
            self._goodput.set(goodput)

    def _enter(self, record: PhaseEntered) -> None:
        end_ns = int(record.unix_s * _NS)
        if self._phase is not None:
            name, since_s, span = self._phase
            span.end(end_ns)
            attributes = {"phase": name.lower(), "cause": self._cause}
            self._duration.record(record.unix_s - since_s, attributes)
            self._phase = None
        self._generation.set(record.generation)
        if record.phase in RECOVERY_PHASES:
            if self._recovery is None:
                self._recovery = self._tracer.start_span("elastic.recovery", start_time=end_ns)
                self._recovery.set_attribute("elastic.cause", self._cause)
            child = self._tracer.start_span(
                f"elastic.recovery.{record.phase.lower()}",
                context=set_span_in_context(self._recovery),
                start_time=end_ns,
            )
            self._phase = (record.phase, record.unix_s, child)
        elif self._recovery is not None:
            self._recovery.set_attribute("elastic.outcome", record.phase.lower())
            self._recovery.end(end_ns)
            self._recoveries.add(1, {"outcome": record.phase.lower()})
            self._recovery = None
            self._cause = "none"


def _place(record: StragglerSeen | StragglerOver) -> dict[str, int]:
    """Which slice, and which host of it if it is not the first."""
    return {"slice": record.slice_index} | ({"host": record.host_index} if record.host_index else {})
