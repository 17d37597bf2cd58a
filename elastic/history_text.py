"""The history in words: one line a record, and what a recovery was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from elastic.records import (
    CoordinatorStarted,
    CopiesCompared,
    CorruptionSuspected,
    FaultInjected,
    FaultMissed,
    LossDetected,
    MessageRefused,
    PersistFailed,
    PhaseEntered,
    Record,
    RestoreChecked,
    RunEnded,
    RunStarted,
    ServiceStarted,
    ShadowCompiled,
    SliceQuarantined,
    SnapshotPersisted,
    SnapshotRejected,
    SnapshotsVerified,
    StateRestored,
    StepCommitted,
    StragglerOver,
    StragglerSeen,
    SuspectBox,
    WorkerEvent,
    WorldFormed,
)
from elastic.report_schema import Corruption, Recovery, Report, Takeover
from reshard.boxes import format_box
from reshard.sizes import format_bytes

_TIER_WORDS = {
    "device": "the devices themselves",
    "shm": "the hosts' own shared memory",
    "peer": "the shared memory of peers",
    "persistent": "the persistent tier",
}
_MODE_WORDS = {
    "in-place": "went on in place, their processes alive,",
    "respawn": "went on in new processes",
    "scale-up": "go on together",
}


def format_seconds(seconds: float | None) -> str:
    """A duration for people: `0 ms`, `38 ms`, `1.24 s`, `3 min 05 s`; `–` for None."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


class OfHost(Protocol):
    """A record that is about a host of a slice."""

    @property
    def slice_index(self) -> int | None:
        """The logical slice, None for a record of none."""

    @property
    def host_index(self) -> int:
        """The host in it."""


def name_host(record: OfHost) -> str:
    """`slice 1`; `slice 1 host 2` for a host that is not the first of its slice."""
    return f"slice {record.slice_index}" + (f" host {record.host_index}" if record.host_index else "")


def format_slices(indices: Sequence[int]) -> str:
    """`slice 1`, `slices 0 and 2`, `slices 0, 1 and 2`, `no slice`."""
    if not indices:
        return "no slice"
    return f"slice{'s' * (len(indices) > 1)} {format_names(indices)}"


def format_names(names: Sequence[object]) -> str:
    """`3`; `3 and 7`; `3, 7 and 8`."""
    *others, last = map(str, names)
    return f"{', '.join(others)} and {last}" if others else last


def explain_recovery(
    recovery: Recovery, losses: Sequence[LossDetected], worlds: Sequence[WorldFormed]
) -> str:
    """What happened, who was lost, what was done and what it took, in a few sentences."""
    sentences = [
        f"{name_host(loss).capitalize()} was lost ({loss.cause}), noticed by {loss.detector}."
        for loss in losses
    ]
    if losses:
        sentences.append(f"It took {format_seconds(recovery.mttd_s)} from the fault to the first notice.")
    if recovery.joined_slices:
        sentences.append(f"{format_slices(recovery.joined_slices).capitalize()} joined.")
    sentences += [f"Generation {world.generation} was given up before a new step." for world in worlds[:-1]]
    sentences.append(_explain_restore(recovery))
    sentences.append(_explain_end(recovery, losses))
    reasons = [world.explanation.strip().rstrip(".") for world in worlds[-1:]]
    sentences += [f"{reason[0].upper()}{reason[1:]}." for reason in reasons if reason]
    return " ".join(sentences)


def _explain_restore(recovery: Recovery) -> str:
    who = format_slices(recovery.slices_after).capitalize()
    how = _MODE_WORDS.get(recovery.mode, f"went on ({recovery.mode})")
    if recovery.restored_step is None:
        return f"{who} {how} from a fresh state: there was no snapshot to restore."
    sources = [
        f"{format_bytes(count)} from {_TIER_WORDS.get(tier, tier)}"
        for tier, count in recovery.source_tiers.items()
        if count
    ]
    read = f" ({', '.join(sources)})" if sources else ""
    moved, bound = format_bytes(recovery.bytes_moved), format_bytes(recovery.bytes_lower_bound)
    minimal = recovery.bytes_moved == recovery.bytes_lower_bound
    bytes_text = (
        f"{moved} moved, the least possible" if minimal else f"{moved} moved where {bound} were needed"
    )
    return f"{who} {how} from the snapshot of step {recovery.restored_step}{read}; {bytes_text}."


def _explain_end(recovery: Recovery, losses: Sequence[LossDetected]) -> str:
    if recovery.resumed_unix_s is None:
        return "The run ended before a new step was committed."
    steps = "1 step was" if recovery.replayed_steps == 1 else f"{recovery.replayed_steps or 'no'} steps were"
    if recovery.resumed_step is None:
        return f"{steps.capitalize()} replayed; no new step was left to run."
    since = "the fault" if losses else "fencing began"
    took = format_seconds(recovery.mttr_s)
    first_new = f"step {recovery.resumed_step}, the first new one, came {took} after {since}"
    return f"{steps.capitalize()} replayed; {first_new}."


def describe(record: Record) -> str:
    """One line about a record, for people."""
    return _describe_run(record) or _describe_state(record) or repr(record)


def _describe_run(record: Record) -> str:
    match record:
        case RunStarted():
            hosts = f" of {record.hosts_per_slice} hosts" if record.hosts_per_slice > 1 else ""
            spares = f" and {record.spares} spare" if record.spares else ""
            asked = f"{record.slices} slices{hosts}{spares}, {record.replicas} replicas, {record.adapter}"
            return f"run {record.run_id} started: {asked}"
        case CoordinatorStarted():
            return describe_takeover(record) if record.phase else "the coordinator started"
        case FaultInjected(slice_index=None):
            return f"fault injected: {record.fault} {record.detail}".rstrip()
        case FaultInjected():
            return f"fault injected: {record.fault} on {name_host(record)} {record.detail}".rstrip()
        case FaultMissed():
            return f"fault {record.detail} was not injected: {record.why}"
        case ServiceStarted():
            pid = f", pid {record.pid}" if record.pid else ""
            return f"runtime service of generation {record.generation} serves{pid} {record.address}".rstrip()
        case LossDetected():
            return f"{name_host(record)} lost: {record.cause} (noticed by {record.detector})"
        case PhaseEntered():
            return f"{record.phase}{': ' + record.why if record.why else ''}"
        case WorldFormed():
            came_from = "fresh state" if record.restored_step is None else f"step {record.restored_step}"
            who = format_slices(record.slices)
            return f"generation {record.generation} formed ({record.mode}): {who}, from {came_from}"
        case RunEnded(error=""):
            return f"run {record.outcome} at step {record.final_step}"
        case RunEnded():
            return f"run {record.outcome} at step {record.final_step}: {record.error}"
        case SliceQuarantined():
            return describe_quarantine(record)
        case ShadowCompiled():
            how = f"programs for {record.num_slices} slice{'s' * (record.num_slices != 1)}: {record.outcome}"
            took = f"{how} in the background after {format_seconds(record.took_s)}"
            return f"{took}: {record.detail}" if record.detail else took
        case StragglerSeen():
            return describe_straggler(record)
        case StragglerOver():
            return f"{name_host(record)} is no longer slow ({record.where})"
        case WorkerEvent():
            pid = f", pid {record.pid}" if record.pid else ""
            return f"{name_host(record)} worker {record.state}{pid} {record.detail}".rstrip()
    return ""


def _describe_state(record: Record) -> str:
    match record:
        case StateRestored():
            took = format_seconds(record.restore_s)
            return f"{name_host(record)} has the state of step {record.step} back in {took}"
        case RestoreChecked():
            same = "equals" if record.captured_digest == record.restored_digest else "DIFFERS FROM"
            return f"restored state of step {record.step} {same} the captured one"
        case StepCommitted():
            loss = "" if record.loss is None else f", loss {record.loss:.4f}"
            return f"{name_host(record)} committed step {record.step}{loss}"
        case SnapshotRejected():
            of_step = "" if record.step is None else f" of step {record.step}"
            return f"snapshot{of_step} on {name_host(record)} refused: {record.reason}"
        case SnapshotsVerified():
            return f"{name_host(record)} verified {record.num_shards} shards of step {record.step}"
        case SnapshotPersisted():
            size, took = format_bytes(record.persisted_bytes), format_seconds(record.took_s)
            return f"step {record.step} is in the persistent tier ({size}, written in {took})"
        case PersistFailed():
            who = "" if record.slice_index is None else f" ({name_host(record)})"
            return f"step {record.step} is NOT in the persistent tier{who}: {record.reason}"
        case CopiesCompared(is_audit=True):
            return "audit: every copy on the devices compared"
        case CopiesCompared():
            captures = "1 capture" if record.num_captures == 1 else f"{record.num_captures} captures"
            return f"copies of {captures} compared across slices"
        case CorruptionSuspected():
            return describe_corruption(record)
        case MessageRefused():
            times = "" if record.num == 1 else f" ({record.num} of the kind since the last told)"
            return f"message from {record.sender} to {record.surface} refused: {record.reason}{times}"
    return ""


def describe_quarantine(record: SliceQuarantined) -> str:
    """Why a slice is kept away, and for how long, in a sentence."""
    after = (
        f"{format_seconds(record.healthy_s)} after it had joined" if record.healthy_s else "before it joined"
    )
    return (
        f"slice {record.slice_index} is in quarantine for {format_seconds(record.delay_s)}: lost "
        f"{record.losses_in_row} times in a row, last {after} ({record.cause})"
    )


def describe_kept_out(report: Report) -> list[str]:
    """A line for a loss that was no number, each coordinator that took over, each slice that was put in
    quarantine or was slow, the callers refused, and each fault that was asked for and did not happen; none
    where there were none.
    """
    said = _describe_loss(report)
    said += [describe_takeover(one, one.away_s) for one in report.takeovers]
    said += [describe_quarantine(record) for record in report.quarantines]
    said += [describe_straggler(record) for record in report.stragglers]
    refused = ", ".join(
        f"{num:,} at {surface} ({cause})"
        for surface, counts in report.refused.items()
        for cause, num in counts.items()
    )
    if refused:
        said.append(f"refused: {refused}")
    said += [f"fault {missed.detail} was not injected: {missed.why}" for missed in report.faults_missed]
    return [f"{line[0].upper()}{line[1:]}" for line in said]


def describe_takeover(found: CoordinatorStarted | Takeover, away_s: float | None = None) -> str:
    """Which coordinator took over in which phase, and what became of the training."""
    after = "" if away_s is None else f" after {format_seconds(away_s)} without one"
    if found.goes_on:
        how = "training went on as it was"
    elif found.phase in ("WAITING", "COMPLETED", "FAILED"):
        how = "nothing had to be done anew"
    else:
        how = "a new generation began"
    return f"another coordinator (epoch {found.epoch}) took over in {found.phase}{after}: {how}"


def describe_straggler(record: StragglerSeen) -> str:
    """Who is slower than the others, in what and by how much, in a sentence."""
    what = "its input takes" if record.where == "input" else "a program on its devices takes"
    return (
        f"{name_host(record)} is slow (seen at step {record.step}): {what} "
        f"{format_seconds(record.own_s)}, the others' {format_seconds(record.others_s)} (× {record.factor:g})"
    )


def _describe_loss(report: Report) -> list[str]:
    first, num = report.steps.first_nonfinite_loss, report.steps.nonfinite_losses
    if first is None:
        return []
    if report.steps.is_loss_finite_again:
        return [f"loss was not finite at {num:,} step{'s' * (num > 1)}, the first of them step {first}"]
    return [f"loss is not finite since step {first}"]


def describe_corruption(record: CorruptionSuspected) -> str:
    """Which step, arrays and slice a finding of silent corruption is about, in a sentence."""
    arrays = "1 array" if record.num_arrays == 1 else f"{record.num_arrays} arrays"
    by = " (audit)" if record.is_audit else ""
    named = "; ".join(describe_suspect(box) for box in record.boxes)
    more = record.num_arrays - len(record.boxes)
    return f"SILENT CORRUPTION: copies of {arrays} of step {record.step} differ{by}: {named}" + (
        f"; and {more} more" if more > 0 else ""
    )


def describe_suspect(found: SuspectBox | Corruption) -> str:
    """Which array, and on which slice it is wrong, for people."""
    where = f"{found.path} {format_box(found.box)}"
    who = format_slices(found.suspects)
    if not found.is_majority:
        return f"{where} on {f'one of {who}' if len(found.suspects) > 1 else who}"
    devices = f" (mesh device {', '.join(map(str, found.devices))})" if found.devices else ""
    return f"{where} is wrong on {who}{devices}"
