"""What the recovery state machine hears and says: frozen events, commands and the values they carry.

Everything here crosses a process boundary as msgspec-encoded data, so nothing holds a reference, a clock or a
handle.
`member` names a host of the job by its number (`elastic.members`): what an agent and its worker are addressed
by. A slice is the fault domain: all of its hosts together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from elastic.detector_events import StacksTaken as StacksTaken
from elastic.detector_events import StepFailed as StepFailed
from elastic.detector_events import TakeStacks as TakeStacks
from elastic.join_events import HostPrepared, PrepareHost
from elastic.records import Record
from elastic.shadow_events import (
    EndShadow,
    EndShadowService,
    EnterShadow,
    ShadowServiceReady,
    ShadowTold,
    StartShadow,
    StartShadowService,
)
from reshard.batch_sizes import NewSteps
from reshard.boxes import Box
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.transfer import Transfer


class Phase(StrEnum):
    """Where a job is in its life; the recovery runs from SUSPECT to REPLAYING."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    SUSPECT = "SUSPECT"
    FENCING = "FENCING"
    PLANNING = "PLANNING"
    RESTORING = "RESTORING"
    REBUILDING = "REBUILDING"
    REPLAYING = "REPLAYING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


class WorkerState(StrEnum):
    """What a host's worker is doing: not there, starting, waiting for a world, or in one."""

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    IN_WORLD = "in-world"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSummary:
    """One complete, verified snapshot in a host's memory: its step, layout and which boxes it holds."""

    step: int
    generation: int
    layout: Layout
    holdings: tuple[Holding, ...]
    position: int = 0
    """Place in the sample stream after the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSpec:
    """What a worker needs to form its next world.

    `slices` are in rank order; `rank` is this worker's place among all their `hosts`. `restore_step` None
    means a fresh state. `restore_generation` is the generation that captured it: a host may hold another of
    that step. `newest_committed` is the newest step any worker committed before this world (-1: none).
    """

    generation: int
    rank: int
    slices: tuple[int, ...]
    service_address: str
    restore_step: int | None
    newest_committed: int
    rehearsal: bool
    replicas: int
    solo: bool = False
    """A rehearsal in which this process plays all ranks; see `elastic.solo`."""
    seats: tuple[int, ...] = ()
    """The logical index of each of `slices`; () where they are the same."""
    audit_every: int = 0
    """Captures from one audit of all copies on the devices to the next (0: only when ordered)."""
    restore_generation: int | None = None
    restore_position: int = 0
    persists: bool = False
    """Whether the agents write snapshots to a persistent tier: they must know the tree of the state."""
    left_out: tuple[tuple[HostId, str, Box], ...] = ()
    """Copies of the snapshot to restore that must not be read, because others contradict them."""
    new_steps: tuple[NewSteps, ...] = ()
    """The worlds in which the steps after the restored one were new; this one comes last."""
    count_writes: bool = False
    """Whether the restore counts that each element is written exactly once."""
    runtime_generation: int = 0
    """The generation in whose runtime, still connected, this world goes on; 0: a new one is connected."""
    hosts_per_slice: int = 1

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """The hosts of the world in rank order: slice by slice, host by host."""
        return tuple(HostId(index, host) for index in self.slices for host in range(self.hosts_per_slice))


# ---- events: agent → coordinator ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAttached:
    """An agent has (again) connected; `worker` is what it found running, `generation` the newest it knows.

    It then tells again what may not have been heard (`elastic.agent_said`).
    """

    member: int
    worker: WorkerState
    worker_pid: int
    generation: int
    data_address: str
    agent_pid: int = 0
    """The agent's own process: another one has lost what the one before was doing."""
    lost_cause: str = ""
    """Why there is no worker, where it was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """An agent's stream broke or its heartbeat is too old."""

    member: int
    detector: str
    last_life_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker has reached its session and waits for a world. `was_warm`: it stood by there already."""

    member: int
    pid: int
    was_warm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker process ended, or was ended because it hung. `aborted`: it ended itself (SIGABRT).

    `killed_by` names the signal, where nobody on this side sent it; `evidence` says what speaks for want of
    memory.
    """

    member: int
    pid: int
    cause: str
    detector: str
    last_life_unix_s: float
    aborted: bool = False
    killed_by: str = ""
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """The user's code raised: not a loss. The job must stop with this message, and exit with this status."""

    member: int
    error: str
    exit_status: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNotice:
    """The worker was told (SIGTERM) that it must leave soon."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A host is out of every world before `generation`; these verified snapshots are in its memory."""

    member: int
    generation: int
    worker: WorkerState
    snapshots: tuple[SnapshotSummary, ...]
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A host has, verified, all it was told to fetch; or it says why not. `rejected`: copies passed over."""

    member: int
    generation: int
    error: str = ""
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A worker has formed its world and has its state on its devices.

    It has captured it again as `snapshot` (None if the state is fresh).
    """

    member: int
    generation: int
    snapshot: SnapshotSummary | None
    form_s: float
    restore_s: float
    bytes_from: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A worker's commit saw the outputs of a step ready. `checksums` of its capture, as in Captured;
    `compile_s` is what the step spent in compiling.
    """

    member: int
    generation: int
    step: int
    checksums: bytes = b""
    compile_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """The state of a world is on its devices: where each box is. The first host tells it for all.

    With `lacking` the state cannot be put there yet: the script asks for this layout, and the host that
    tells it has not the box named.
    """

    member: int
    generation: int
    layout: Layout
    lacking: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The checksums of one host's capture, 8 bytes each (`reshard.copies.pack_checksums`).

    In the order of the shards that `reshard.captures` gives its host; of an audit, of all that its devices
    hold, array by array in the order of the layout, devices in the order of the mesh.
    """

    member: int
    generation: int
    step: int
    checksums: bytes
    is_audit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftWorld:
    """A worker has stopped at a step boundary as told (or has rehearsed) and waits to be fenced."""

    member: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A worker's training loop has come to its end; the host's snapshots at that moment."""

    member: int
    generation: int
    step: int
    snapshots: tuple[SnapshotSummary, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestDone:
    """An agent has computed the digest of a whole state ("" when the snapshot was overwritten meanwhile)."""

    member: int
    generation: int
    step: int
    purpose: Literal["captured", "restored", "final"]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePersisted:
    """A host has written its share of the snapshot at `step` to the persistent tier; or it says why not.

    `left_out`: it was due, but the one before was not settled yet, so no host begins it.
    """

    member: int
    generation: int
    step: int
    error: str = ""
    left_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted:
    """All shares of a snapshot are put together in the persistent tier, for good; or `error` says why not.

    `snapshot` tells its layout and position; it has no holdings. `persisted_bytes` are those of its arrays.
    """

    member: int
    generation: int
    step: int
    snapshot: SnapshotSummary | None = None
    persisted_bytes: int = 0
    error: str = ""


# ---- events: from the coordinator's own shell --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReady:
    """The adapter's runtime service of a generation listens at `address`."""

    generation: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLost:
    """The runtime service of a generation has died, or is stopped and answers nobody."""

    generation: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistedFound:
    """What earlier runs left in the persistent tier, the newest first; told once, before the first world."""

    snapshots: tuple[SnapshotSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Somebody wants the job to end (Ctrl-C, a lost launcher)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; deadlines are looked at."""


AgentEvent = (
    AgentAttached
    | WorkerReady
    | WorkerLost
    | StepFailed
    | StacksTaken
    | WorkerFailed
    | PreemptionNotice
    | Fenced
    | Staged
    | Rebuilt
    | Committed
    | LaidOut
    | Captured
    | LeftWorld
    | Finished
    | DigestDone
    | SharePersisted
    | Persisted
    | ShadowTold
    | HostPrepared
)
Event = (
    AgentEvent
    | AgentLost
    | ServiceReady
    | ServiceLost
    | ShadowServiceReady
    | PersistedFound
    | StopRequested
    | Tick
)


# ---- commands: coordinator → agents and shell --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start the host's worker process; an older one is ended first.

    `is_awaited`: nobody trains until it is there. Where others do, it may rehearse first what it will need.
    """

    member: int
    is_awaited: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWorker:
    """End the host's worker process now."""

    member: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Get the worker out of every older world and report; from now on refuse what is older than `generation`.

    With `leave_out` the worker has been told to leave: it ends, and is reported as NONE.
    """

    member: int
    generation: int
    leave_out: bool = False
    keep_runtime: bool = False
    """Whether the worker holds on to its runtime: the next world may go on in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAfter:
    """Let the worker stop at the boundary after `step` (or at its next one, if that is later)."""

    member: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditAfter:
    """Let the worker's first capture of `step` or later be an audit; if that is over, nothing."""

    member: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Fetch these pieces of the snapshot at `step` from peers, verified, into this host's memory.

    `of_generation` is the generation that captured it: a peer may hold another state under the same step.
    `alternates[i]` are other members that hold the shard of `transfers[i]`, if any do.
    The coordinator's shell fills in `addresses`: where each member's agent serves its shards.
    """

    member: int
    generation: int
    step: int
    layout: Layout
    transfers: tuple[Transfer, ...]
    alternates: tuple[tuple[int, ...], ...] = ()
    of_generation: int = 0
    position: int = 0
    addresses: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePersisted:
    """Read these boxes of the snapshot at `step` from the persistent tier into this host's memory.

    Answered by Staged. `layout` is that of the snapshot.
    """

    member: int
    generation: int
    step: int
    layout: Layout
    boxes: tuple[tuple[str, Box], ...]
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishPersist:
    """All hosts have written their shares of the snapshot at `step`: put them together for good.

    `restored_steps` tells which steps the job has left behind: generation and restored step of each world.
    """

    member: int
    generation: int
    step: int
    restored_steps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistSettled:
    """The snapshot of `step`, captured in `generation`, is in the persistent tier, or (`failed`) will not be:
    the next one may begin.
    """

    member: int
    generation: int
    step: int
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Where the other members' agents serve their shards; sent whenever that changes."""

    member: int
    addresses: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Form this world."""

    member: int
    world: WorldSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDigest:
    """Compute the digest of the whole state at `step`, captured in `of_generation`, out of these pieces.

    With `is_persisted` it is read from the persistent tier.
    """

    member: int
    generation: int
    step: int
    of_generation: int
    purpose: Literal["captured", "restored", "final"]
    layout: Layout
    transfers: tuple[Transfer, ...]
    addresses: dict[int, str] = field(default_factory=dict)
    is_persisted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetHost:
    """This host was counted as lost: end its worker and attach again without one.

    Its snapshots may stay: they name their generation, and what a later world left behind is not chosen.
    """

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """The job is over: let the worker end (or end it), drop the memory, exit."""

    member: int
    completed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartService:
    """Start the adapter's runtime service for a generation of so many processes."""

    generation: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Append a record to the run's history."""

    record: Record


AgentCommand = (
    StartWorker
    | EndWorker
    | Fence
    | StopAfter
    | Stage
    | StagePersisted
    | FinishPersist
    | PersistSettled
    | Peers
    | AuditAfter
    | TakeStacks
    | Assign
    | ComputeDigest
    | ResetHost
    | Shutdown
    | PrepareHost
    | StartShadow
    | EnterShadow
    | EndShadow
)
Command = AgentCommand | StartService | StartShadowService | EndShadowService | Write
