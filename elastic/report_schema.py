"""The recovery report as frozen values: `report.json`, schema 1, field for field.

The words *committed*, *lost*, *repeated* and *replayed* mean what `docs/` says about them; how each figure
follows from the history is told where it is computed (`history_lineage`, `history_samples`,
`history_recoveries`, `history_verdicts`). Fields may be added to a schema, never renamed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elastic.records import FaultMissed, SliceQuarantined, StragglerSeen
from reshard.boxes import Box

SCHEMA = 1

Verdict = Literal["held", "broken", "unknown"]
Outcome = Literal["completed", "failed"]

PHASES = ("detect", "fence", "plan", "restore", "rebuild", "replay")
TIERS = ("device", "shm", "peer", "persistent")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What ran, for how long and how it ended. `error` is empty unless the run failed."""

    id: str
    adapter: str
    in_place: str
    simulated_faults: bool
    slices: int
    seed: int
    started_unix_s: float
    wall_s: float
    outcome: Outcome
    error: str
    hosts_per_slice: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Distinct optimizer steps: in the final lineage, gone from it, applied twice, and run again.

    `before` were done by earlier runs: this one went on from their persistent tier.
    """

    target: int | None
    committed: int
    lost: int
    repeated: int
    replayed: int
    before: int = 0
    nonfinite_losses: int = 0
    """Steps whose loss was NaN or infinite; training went on."""
    first_nonfinite_loss: int | None = None
    """The first of them."""
    is_loss_finite_again: bool = False
    """Whether the last step's loss was finite all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """Samples in the final lineage, missing from it, and used twice in it."""

    consumed: int
    lost: int
    repeated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Seconds a recovery spent in each phase; time in WAITING is in none of them."""

    detect: float = 0.0
    fence: float = 0.0
    plan: float = 0.0
    restore: float = 0.0
    rebuild: float = 0.0
    replay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Badput:
    """Seconds of training time that made no new step, by what they went into."""

    detect: float = 0.0
    fence: float = 0.0
    plan: float = 0.0
    restore: float = 0.0
    rebuild: float = 0.0
    replay: float = 0.0
    wait: float = 0.0
    snapshot_stall: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """Loss of the last effective step, digest of the newest snapshot (empty: there is none)."""

    loss: float | None
    state_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One change of the world, from its fault to the first new step.

    `resumed_unix_s`, `mttr_s` and `resumed_step` are None when no new step came after it: the run failed in
    it (all three), or only replayed steps were left to run (`resumed_step` alone).
    """

    generation: int
    cause: str
    lost_slices: tuple[int, ...]
    joined_slices: tuple[int, ...]
    slices_after: tuple[int, ...]
    mode: str
    fault_unix_s: float
    detected_unix_s: float
    resumed_unix_s: float | None
    mttd_s: float
    mttr_s: float | None
    phases_s: PhaseTimes
    restored_step: int | None
    resumed_step: int | None
    replayed_steps: int
    bytes_moved: int
    bytes_lower_bound: int
    source_tiers: dict[str, int]
    explanation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """An array whose copies differ: since when, one of its boxes, and the slices it is wrong on.

    Without a majority (`is_majority` False) it is wrong on one of `suspects`. `devices` are positions in the
    mesh.
    """

    first_step: int
    path: str
    box: Box
    slices: tuple[int, ...]
    suspects: tuple[int, ...]
    is_majority: bool
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Host snapshots (one slice's copy of one step): taken, verified before a restore, refused, skipped.

    `bytes_per_host` is the largest taken; the stalls are how long `commit` held the loop of a worker.
    `persisted` and `persist_failed` count whole snapshots in the persistent tier; `persisted_step` is the
    newest of them.
    `compared` captures and `audits` had their copies on different slices compared, `disagreements` of them
    with a finding; `corruptions` are the first arrays found.
    """

    captured: int
    verified: int
    rejected: int
    bytes_per_host: int
    stall_s_p50: float
    stall_s_p99: float
    replicas: int
    persisted: int = 0
    persist_failed: int = 0
    persisted_step: int | None = None
    compared: int = 0
    audits: int = 0
    disagreements: int = 0
    corruptions: tuple[Corruption, ...] = ()
    skipped: int = 0
    """Due, but left out because the one before was not yet where it belongs."""
    interval_steps: int = 1
    """Steps from one to the next, as they were at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """A coordinator that took over: in which phase, after how long without one, and whether training went on
    as it was.
    """

    epoch: int
    unix_s: float
    phase: str
    goes_on: bool
    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run did, lost and needed, computed from its history alone."""

    schema: int = SCHEMA
    run: RunInfo
    steps: StepCounts
    samples: SampleCounts
    goodput: float
    badput_s: Badput
    final: Final
    recoveries: tuple[Recovery, ...]
    snapshots: Snapshots
    invariants: dict[str, Verdict] = field(default_factory=dict)
    quarantines: tuple[SliceQuarantined, ...] = ()
    """Slices that were kept away because they were lost again and again, in order."""
    stragglers: tuple[StragglerSeen, ...] = ()
    """Slices that were slower than the others, each time that was found, in order."""
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    """Messages and callers that were refused, by surface and reason."""
    takeovers: tuple[Takeover, ...] = ()
    """Coordinators that took over from one that died or hung."""
    faults_missed: tuple[FaultMissed, ...] = ()
    """Faults that were asked for and did not happen, and why not."""

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the invariants that the history shows broken."""
        return tuple(name for name, verdict in self.invariants.items() if verdict == "broken")
