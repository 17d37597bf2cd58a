"""The two protocols of a job: agent ↔ coordinator (gRPC) and worker ↔ agent (unix socket), as lists of
message types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from elastic.events import (
    AgentCommand,
    AgentEvent,
    AuditAfter,
    Captured,
    Fence,
    LaidOut,
    LeftWorld,
    PreemptionNotice,
    StacksTaken,
    StepFailed,
    StopAfter,
    TakeStacks,
    WorkerFailed,
    WorldSpec,
)
from elastic.records import FaultInjected, StepCommitted
from elastic.refusals import RefusalsTold
from elastic.wire import Codec
from snapshot.persist_tree import TreeDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """I am alive. From an agent also its clock, so that the last sign of life can be told in its time."""

    unix_s: float


# ---- worker → agent --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker's first message on a connection: who it is and in which world it is (0: none)."""

    pid: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Make room in the arena, as `elastic.ports.Room` says; answered by Reserved."""

    slot_bytes: int
    journal_record_bytes: int
    journal_records: int
    buddy_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRebuilt:
    """The world is formed and the state on its devices; `restored_step` None for a fresh state."""

    generation: int
    restored_step: int | None
    form_s: float
    restore_s: float
    bytes_from: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommitted:
    """The outputs of a step are ready, and captured if it was their turn (`captured_bytes` 0: they were not).

    `skipped`: a capture was due and left out, as it could not keep up. `interval_steps` lie between two
    captures at present. `checksums` are those of the capture of this very step, as in
    `elastic.events.Captured`; those of any other come on their own.
    """

    generation: int
    step: int
    loss: float | None
    step_s: float
    stall_s: float
    captured_bytes: int
    compile_s: float
    cache_hits: int
    cache_misses: int
    skipped: bool = False
    interval_steps: int = 1
    checksums: bytes = b""
    host_s: float = 0.0
    """What the host took for the step: its batch, and the Python of the loop."""
    device_s: float | None = None
    """What a tiny program took on this process's devices, when it was timed after the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescribed:
    """How the tree of the world's state looks, for the persistent tier."""

    tree: TreeDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwound:
    """The worker is out of every world before `generation`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEnded:
    """The training loop has come to its end after `step`."""

    generation: int
    step: int


# ---- agent → coordinator, beside events -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTold:
    """A step is committed: its record for the history, and the checksums of its capture, if there was one."""

    record: StepCommitted
    checksums: bytes = b""
    is_found: bool = False
    """Whether the agent found it in its host's memory: then it may well have been told before."""


# ---- coordinator → agent, beside commands -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsKept:
    """This host's commits up to `step` of `generation` are in the history: they need not be told again."""

    member: int
    generation: int
    step: int


# ---- agent → worker --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The answer to Reserve; `error` says why there is no room (with how much is needed and how much there
    is).
    """

    error: str = ""
    needed_bytes: int = 0
    available_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """What this host keeps for other slices of the snapshot of `step` is there."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeTurn:
    """The process that stands by at its session may go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterWorld:
    """Form this world."""

    world: WorldSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearse:
    """Before your turn: play these worlds alone, one after the other."""

    worlds: tuple[WorldSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """All of them are over, or one was given up (`error`) and with it those after it."""

    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """There will be no other world."""

    completed: bool


WORKER_CODEC = Codec(
    (
        Hello,
        Heartbeat,
        Reserve,
        WorldRebuilt,
        WorkerCommitted,
        Unwound,
        LoopEnded,
        LaidOut,
        StateDescribed,
        Captured,
        LeftWorld,
        StepFailed,
        StacksTaken,
        WorkerFailed,
        PreemptionNotice,
        Reserved,
        Replicated,
        TakeTurn,
        Rehearse,
        Rehearsed,
        EnterWorld,
        JobEnded,
        Fence,
        StopAfter,
        AuditAfter,
        TakeStacks,
    )
)
CONTROL_CODEC = Codec(
    (
        *get_args(AgentEvent),
        *get_args(AgentCommand),
        Heartbeat,
        StepTold,
        CommitsKept,
        RefusalsTold,
        FaultInjected,
    )
)
