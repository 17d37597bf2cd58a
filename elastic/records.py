"""The history of a run: what happened, in order, as frozen records in `DIR/events.jsonl`.

The coordinator appends one JSON object a line; nothing else is kept about a run. The report, the live
display and `elastic events` are pure functions of this history (history first, judgement afterwards).
`slice_index` is the logical slice that a record is about, `host_index` the host of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from reshard.boxes import Box
from reshard.errors import UsageError

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The first record: what was asked for."""

    unix_s: float
    run_id: str
    adapter: str
    in_place: str
    simulated_faults: bool
    slices: int
    min_slices: int
    devices_per_host: int
    replicas: int
    seed: int
    target_steps: int | None
    command: tuple[str, ...] = ()
    spares: int = 0
    epoch_samples: int | None = None
    """Samples in an epoch, where it is known before the start."""
    hosts_per_slice: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStarted:
    """A coordinator commands from now on; a later `epoch` has taken over from the one before it.

    `generation` and `phase` are what it found ("" for the first one). `goes_on`: the world trains on.
    """

    unix_s: float
    epoch: int
    pid: int
    generation: int = 0
    phase: str = ""
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected:
    """A fault that the chaos tooling caused, with the moment it did so. `slice_index` is None for a fault
    of no slice.
    """

    unix_s: float
    fault: str
    slice_index: int | None
    detail: str = ""
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMissed:
    """A fault that was asked for and did not happen (to some or all of its targets), and why not."""

    unix_s: float
    detail: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStarted:
    """The runtime service of a generation serves: its process, and where. `pid` is 0 where none is needed."""

    unix_s: float
    generation: int
    pid: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDetected:
    """The coordinator counts a slice as lost, because of this host of it. `last_life_unix_s` is the last sign
    of life of what died.
    """

    unix_s: float
    generation: int
    slice_index: int
    cause: str
    detector: str
    last_life_unix_s: float
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEntered:
    """The recovery state machine changed its phase. `why` is a sentence for people."""

    unix_s: float
    generation: int
    phase: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """A worker changed its state: "started", "ready", "unwound", "ended", "adopted", "rebuilt"."""

    unix_s: float
    generation: int
    slice_index: int
    state: str
    pid: int = 0
    detail: str = ""
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldFormed:
    """A new world was decided: who is in it, from which step it goes on and what has to move.

    `mode` is "first", "rehearsal", "in-place", "respawn" or "scale-up". Bytes are of the plan;
    `restored_step` is None when the state is made fresh.
    """

    unix_s: float
    generation: int
    slices: tuple[int, ...]
    mode: str
    restored_step: int | None
    newest_committed: int
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    bytes_moved: int
    bytes_lower_bound: int
    explanation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRestored:
    """One slice has its state back on its devices. Bytes by tier are what this slice read from each."""

    unix_s: float
    generation: int
    slice_index: int
    step: int
    bytes_from: dict[str, int]
    form_s: float
    restore_s: float
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreChecked:
    """Restored state against the captured one: digest of the snapshot, and of what the new world's devices
    held after the restore.
    """

    unix_s: float
    generation: int
    step: int
    captured_digest: str
    restored_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """A worker's `commit` saw the outputs of a step ready. `sample_ids` come from that host's journal, not
    from the plan.

    `position` is the sample's place in the endless stream of epochs at which the step's batch starts.
    `compile_s` is what the worker spent in tracing, lowering and compiling since its previous commit.
    `captured_bytes` is 0 where nothing was captured; `skipped`: a capture was due and could not keep up.
    """

    unix_s: float
    generation: int
    slice_index: int
    step: int
    position: int
    sample_ids: tuple[int, ...]
    loss: float | None
    step_s: float
    stall_s: float
    captured_bytes: int
    compile_s: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    skipped: bool = False
    interval_steps: int = 1
    """Steps from one capture to the next at that time, as its world had agreed."""
    loss_is_finite: bool = True
    """False where the loss was NaN or infinite, which JSON cannot say (`loss` is then null in the file)."""
    host_s: float = 0.0
    """What the slice's host took for the step itself: its batch, and the Python of the loop."""
    device_s: float | None = None
    """What a tiny program took on the slice's devices; None where it was not timed."""
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRejected:
    """A snapshot or shard was refused during verification, and why."""

    unix_s: float
    generation: int
    slice_index: int
    step: int | None
    reason: str
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsVerified:
    """An agent verified this many shards by checksum before a restore."""

    unix_s: float
    generation: int
    slice_index: int
    step: int
    num_shards: int
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPersisted:
    """A snapshot is complete in the persistent tier. `took_s` is from the first host's share to the end, None
    where that was not heard of.
    """

    unix_s: float
    generation: int
    step: int
    persisted_bytes: int
    took_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed:
    """A snapshot did not get into the persistent tier, or was refused when it was read. Training goes on."""

    unix_s: float
    generation: int
    step: int
    slice_index: int | None
    reason: str
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCompiled:
    """The programs of a world of so many slices were compiled beside the one that trains; or not.

    `outcome` is "compiled", "failed", "skipped" (memory was short) or "given up" (the world was left).
    """

    unix_s: float
    generation: int
    num_slices: int
    took_s: float
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesCompared:
    """The checksums of so many captures more have been compared across slices; `is_audit`: of one audit, of
    all copies on the devices.
    """

    unix_s: float
    generation: int
    num_captures: int
    is_audit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectBox:
    """A box whose copies differ. `suspects` are the slices whose copies a majority finds wrong; without one
    (`is_majority` False) all that have it. `devices` are positions in the mesh, where devices were compared.
    """

    path: str
    box: Box
    slices: tuple[int, ...]
    suspects: tuple[int, ...]
    is_majority: bool
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionSuspected:
    """Copies of the state after `step`, which must be the same, differ: some were changed without an error.

    `num_arrays` arrays and `num_boxes` boxes are concerned, of which `boxes` names a few. `slices` were
    compared; `suspects` are those that a majority names, or (`is_majority` False) all that differ.
    """

    unix_s: float
    generation: int
    step: int
    is_audit: bool
    num_arrays: int
    num_boxes: int
    slices: tuple[int, ...]
    suspects: tuple[int, ...]
    is_majority: bool
    boxes: tuple[SuspectBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceQuarantined:
    """A slice was lost again soon after it had joined (`healthy_s`), and is kept away for `delay_s`.

    Of losses with no healthy time between them this is number `losses_in_row`. While no world runs the slice
    is started all the same.
    """

    unix_s: float
    generation: int
    slice_index: int
    losses_in_row: int
    healthy_s: float
    delay_s: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSeen:
    """A slice is slower than the others, for several windows in a row: its `input` (host) or its `device`s.

    `own_s` is its median time, `others_s` the median of the others', `factor` the one over the other.
    """

    unix_s: float
    generation: int
    slice_index: int
    step: int
    where: str
    factor: float
    own_s: float
    others_s: float
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerOver:
    """A straggler is as fast as the others again, or the world that it slowed down is over."""

    unix_s: float
    generation: int
    slice_index: int
    step: int
    where: str
    host_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRefused:
    """A message or call with a stale generation, a wrong token or of somebody unknown was refused.

    `surface` is where it came to: "control" (the coordinator), "worker-socket" or "data-plane" (an agent's).
    A record stands for `num` refusals of its kind: those since the last one.
    """

    unix_s: float
    generation: int
    sender: str
    reason: str
    surface: str = "control"
    cause: str = "stale-generation"
    num: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last record. `outcome` is "completed" or "failed"; the digest is of the newest snapshot ("" if
    there is none).
    """

    unix_s: float
    generation: int
    outcome: str
    error: str
    final_step: int
    state_digest: str
    exit_status: int = 1
    """What the command exits with when the run has failed."""
    restorable_step: int | None = None
    """For a failed run: the newest step whose snapshot was whole at the end (-1: none, None: not known)."""


Record = (
    RunStarted
    | CoordinatorStarted
    | FaultInjected
    | FaultMissed
    | ServiceStarted
    | LossDetected
    | PhaseEntered
    | WorkerEvent
    | WorldFormed
    | StateRestored
    | RestoreChecked
    | StepCommitted
    | SnapshotRejected
    | SnapshotsVerified
    | SnapshotPersisted
    | PersistFailed
    | ShadowCompiled
    | CopiesCompared
    | CorruptionSuspected
    | SliceQuarantined
    | StragglerSeen
    | StragglerOver
    | MessageRefused
    | RunEnded
)

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        CoordinatorStarted,
        FaultInjected,
        FaultMissed,
        ServiceStarted,
        LossDetected,
        PhaseEntered,
        WorkerEvent,
        WorldFormed,
        StateRestored,
        RestoreChecked,
        StepCommitted,
        SnapshotRejected,
        SnapshotsVerified,
        SnapshotPersisted,
        PersistFailed,
        ShadowCompiled,
        CopiesCompared,
        CorruptionSuspected,
        SliceQuarantined,
        StragglerSeen,
        StragglerOver,
        MessageRefused,
        RunEnded,
    )
}


def encode_record(record: Record) -> bytes:
    """One record as a line of JSON, its type under the key `kind`."""
    fields = msgspec.to_builtins(record)
    return msgspec.json.encode({"kind": type(record).__name__, **fields}) + b"\n"


def decode_record(line: bytes | str) -> Record:
    """A line of `events.jsonl` back as its record. Raises UsageError when it is none."""
    try:
        fields = msgspec.json.decode(line)
        record: Record = msgspec.convert(fields, _TYPES[fields.pop("kind")])
    except (msgspec.MsgspecError, KeyError, AttributeError) as error:
        raise UsageError(f"not a record of a run's history: {line[:120]!r} ({error})") from error
    return record


def read_history(path: Path) -> Iterator[Record]:
    """The records of a run, oldest first; a torn last line (a run killed while writing) is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decode_record(line)


def of_kind(records: Iterable[Record], kind: type[R]) -> list[R]:
    """The records of one type, in order."""
    return [record for record in records if isinstance(record, kind)]
