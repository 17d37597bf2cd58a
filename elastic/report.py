"""The recovery report of a run: computed from its history, written to and read from `DIR/report.json`.

report = build_report(list(read_history(directory / "events.jsonl")))
write_report(report, directory)
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from elastic.history_copies import audit_copies
from elastic.history_lineage import Execution, Lineage, rehearsal_generations, trace_lineage
from elastic.history_phases import Span, end_of
from elastic.history_recoveries import build_recoveries, real_worlds
from elastic.history_samples import audit_samples
from elastic.history_takeovers import takeovers
from elastic.history_verdicts import judge
from elastic.records import (
    FaultMissed,
    MessageRefused,
    PersistFailed,
    PhaseEntered,
    Record,
    RunEnded,
    RunStarted,
    SliceQuarantined,
    SnapshotPersisted,
    SnapshotRejected,
    SnapshotsVerified,
    StragglerSeen,
    of_kind,
)
from elastic.refusals import count_refused
from elastic.report_schema import (
    PHASES,
    SCHEMA,
    Badput,
    Corruption,
    Final,
    PhaseTimes,
    Recovery,
    Report,
    RunInfo,
    SampleCounts,
    Snapshots,
    StepCounts,
    Verdict,
)
from reshard.errors import UsageError

__all__ = [
    "SCHEMA",
    "Badput",
    "Corruption",
    "Final",
    "PhaseTimes",
    "Recovery",
    "Report",
    "RunInfo",
    "SampleCounts",
    "Snapshots",
    "StepCounts",
    "Verdict",
    "build_report",
    "read_report",
    "write_report",
]

REPORT_NAME = "report.json"


def build_report(records: Sequence[Record]) -> Report:
    """Judge a run by its history, in the order the coordinator wrote it.

    A history without an end makes a report with outcome "failed" that says so. Raises UsageError for one that
    is empty or has no RunStarted.
    """
    if not records:
        raise UsageError("the history of this run is empty: nothing was recorded")
    started = next((record for record in records if isinstance(record, RunStarted)), None)
    if started is None:
        raise UsageError("this history does not tell how its run was started: its first record is missing")
    ended = next((record for record in reversed(records) if isinstance(record, RunEnded)), None)
    lineage = trace_lineage(records)
    audit = audit_samples(lineage, started.epoch_samples)
    recoveries, spans = build_recoveries(records, lineage)
    badput = _badput(records, lineage, spans)
    return Report(
        run=_run_info(records, started, ended),
        steps=StepCounts(
            target=started.target_steps,
            committed=len(lineage.effective.keys() | lineage.unseen),
            lost=len(lineage.lost),
            repeated=len(lineage.doubled),
            replayed=len(lineage.replayed),
            before=0 if lineage.started_fresh else lineage.first_step or 0,
            **_nonfinite_losses(lineage),
        ),
        samples=SampleCounts(consumed=audit.consumed, lost=audit.lost, repeated=audit.repeated),
        goodput=_goodput(records, lineage, badput),
        badput_s=badput,
        final=Final(loss=_final_loss(lineage), state_digest=ended.state_digest if ended else ""),
        recoveries=tuple(recoveries),
        snapshots=_snapshots(records, lineage, started.replicas),
        invariants=judge(records, lineage, audit),
        quarantines=tuple(of_kind(records, SliceQuarantined)),
        stragglers=tuple(of_kind(records, StragglerSeen)),
        refused=count_refused(of_kind(records, MessageRefused)),
        takeovers=takeovers(records),
        faults_missed=tuple(of_kind(records, FaultMissed)),
    )


def write_report(report: Report, directory: Path) -> Path:
    """Write `report.json` into `directory`, all of it or nothing; return its path."""
    path = directory / REPORT_NAME
    unfinished = path.with_name(f".{REPORT_NAME}.{os.getpid()}")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    unfinished.replace(path)
    return path


def read_report(directory: Path) -> Report:
    """The report of the run in `directory`. Raises UsageError when there is none, or none of this schema."""
    path = directory / REPORT_NAME
    try:
        fields = msgspec.json.decode(path.read_bytes())
        schema = fields.get("schema") if isinstance(fields, dict) else None
        if schema != SCHEMA:
            raise UsageError(f"{path} has schema {schema!r}; this version reads schema {SCHEMA}")
        return msgspec.convert(fields, Report)
    except OSError as error:
        raise UsageError(f"there is no report to read at {path} ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not a recovery report ({error})") from error


def _run_info(records: Sequence[Record], started: RunStarted, ended: RunEnded | None) -> RunInfo:
    unended = "The history has no end: the run is still going, or its coordinator was killed."
    return RunInfo(
        id=started.run_id,
        adapter=started.adapter,
        in_place=started.in_place,
        simulated_faults=started.simulated_faults,
        slices=started.slices,
        seed=started.seed,
        started_unix_s=started.unix_s,
        wall_s=max(0.0, end_of(records) - started.unix_s),
        outcome="completed" if ended is not None and ended.outcome == "completed" else "failed",
        error=unended if ended is None else ended.error,
        hosts_per_slice=started.hosts_per_slice,
    )


def _final_loss(lineage: Lineage) -> float | None:
    last = list(lineage.effective.values())[-1:]
    loss = last[0].loss if last else None
    return loss if loss is not None and math.isfinite(loss) else None


def _nonfinite_losses(lineage: Lineage) -> dict[str, Any]:
    """Which steps of the final lineage had a loss that is no number."""
    executions = lineage.effective.items()
    found = [step for step, one in executions if not all(commit.loss_is_finite for commit in one.commits)]
    return {
        "nonfinite_losses": len(found),
        "first_nonfinite_loss": min(found, default=None),
        "is_loss_finite_again": bool(found) and max(found) < max(lineage.effective),
    }


def _training_start(records: Sequence[Record], lineage: Lineage) -> float | None:
    """When the first world dispatched its first step: at REPLAYING, else its first commit less a step."""
    worlds = real_worlds(records, lineage)
    if not worlds:
        return None
    rehearsals = rehearsal_generations(records)
    first = worlds[0]
    for record in records[first.index :]:
        if not isinstance(record, PhaseEntered) or record.phase not in ("REPLAYING", "RUNNING"):
            continue
        if record.generation not in rehearsals:
            return record.unix_s
    own = [e.commits[0] for e in lineage.executions.values() if e.generation == first.formed.generation]
    return own[0].unix_s - own[0].step_s if own else first.formed.unix_s


def _badput(records: Sequence[Record], lineage: Lineage, spans: Sequence[Span]) -> Badput:
    seconds = {phase: sum((span.seconds[phase] for span in spans), 0.0) for phase in PHASES}
    steady = (e for e in lineage.executions.values() if not _is_within(e, spans))
    stall_s = sum((execution.stall_s for execution in steady), 0.0)
    return Badput(**seconds, wait=_waiting_s(records, lineage), snapshot_stall=stall_s)


def _is_within(execution: Execution, spans: Sequence[Span]) -> bool:
    """Whether a step's stall is already part of a recovery's time."""
    return any(span.detected_unix_s < execution.unix_s <= span.end_unix_s for span in spans)


def _waiting_s(records: Sequence[Record], lineage: Lineage) -> float:
    """Time in WAITING once there had been a world."""
    worlds = real_worlds(records, lineage)
    if not worlds:
        return 0.0
    phases = [record for record in records[worlds[0].index :] if isinstance(record, PhaseEntered)]
    ends = [phase.unix_s for phase in phases[1:]] + [end_of(records)]
    pairs = zip(phases, ends, strict=True) if phases else ()
    return sum((max(0.0, end - phase.unix_s) for phase, end in pairs if phase.phase == "WAITING"), 0.0)


def _goodput(records: Sequence[Record], lineage: Lineage, badput: Badput) -> float:
    start = _training_start(records, lineage)
    wall_s = 0.0 if start is None else end_of(records) - start
    if wall_s <= 0 or not lineage.effective:
        return 0.0
    lost_s: float = sum(getattr(badput, name) for name in Badput.__dataclass_fields__)
    return min(1.0, max(0.0, 1.0 - lost_s / wall_s))


def _snapshots(records: Sequence[Record], lineage: Lineage, replicas: int) -> Snapshots:
    commits = [commit for execution in lineage.executions.values() for commit in execution.commits]
    captures = [commit for commit in commits if commit.captured_bytes > 0]
    rehearsals = rehearsal_generations(records)
    verified = [r for r in of_kind(records, SnapshotsVerified) if r.generation not in rehearsals]
    stalls = sorted(commit.stall_s for commit in captures)
    persisted = of_kind(records, SnapshotPersisted)
    copies = audit_copies(records)
    return Snapshots(
        captured=len(captures),
        verified=len(verified),
        rejected=len(of_kind(records, SnapshotRejected)),
        bytes_per_host=max((commit.captured_bytes for commit in captures), default=0),
        stall_s_p50=_percentile(stalls, 50),
        stall_s_p99=_percentile(stalls, 99),
        replicas=replicas,
        persisted=len(persisted),
        persist_failed=len(of_kind(records, PersistFailed)),
        persisted_step=persisted[-1].step if persisted else None,
        compared=copies.compared,
        audits=copies.audits,
        disagreements=copies.disagreements,
        corruptions=copies.corruptions,
        skipped=sum(commit.skipped for commit in commits),
        interval_steps=max(commits, key=lambda commit: commit.unix_s).interval_steps if commits else 1,
    )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile of ordered values; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
