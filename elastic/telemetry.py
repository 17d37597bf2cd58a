"""Recoveries as OpenTelemetry traces and metrics. Without an exporter configured this costs next to nothing.

One trace a recovery: a span `elastic.recovery` from the detection to the first new step, a child span for
each phase. Metrics follow the names of the contracts; durations are in seconds.
"""

from __future__ import annotations

from opentelemetry import metrics, trace
from opentelemetry.trace import Span, set_span_in_context

from elastic.records import (
    CorruptionSuspected,
    LossDetected,
    MessageRefused,
    PersistFailed,
    PhaseEntered,
    Record,
    SnapshotPersisted,
    SnapshotRejected,
    StepCommitted,
    WorldFormed,
)

RECOVERY_PHASES = ("SUSPECT", "FENCING", "PLANNING", "RESTORING", "REBUILDING", "REPLAYING")
_NS = 1_000_000_000


class RecoveryTracer:
    """Turns the history, as it is written, into spans and metrics."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("elastic")
        meter = metrics.get_meter("elastic")
        self._duration = meter.create_histogram(
            "elastic.recovery.duration", unit="s", description="Duration of a recovery's phase."
        )
        self._recoveries = meter.create_counter("elastic.recoveries", description="Recoveries by outcome.")
        self._steps = meter.create_counter("elastic.steps", description="Steps by kind.")
        self._generation = meter.create_gauge("elastic.generation", description="The job's generation.")
        self._stall = meter.create_histogram(
            "elastic.snapshot.stall", unit="s", description="How long a capture held a worker's loop."
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
        self._refused = meter.create_counter(
            "elastic.refused", description="Messages and callers refused, by surface and reason."
        )
        self._recovery: Span | None = None
        self._phase: tuple[str, float, Span] | None = None
        self._cause = "none"
        self._newest_step = -1

    def hear(self, record: Record) -> None:
        """Take in the next record of the history."""
        if isinstance(record, LossDetected):
            self._cause = record.detector
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

    def _hear_commit(self, record: StepCommitted) -> None:
        if record.captured_bytes:
            self._stall.record(record.stall_s, {"slice": record.slice_index})
            self._captured.add(record.captured_bytes, {"slice": record.slice_index})
        if record.step > self._newest_step:
            self._newest_step = record.step  # each slice tells of each step; it counts once
            self._steps.add(1, {"kind": "committed"})

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
