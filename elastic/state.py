"""The frozen state of the recovery state machine: configuration, members, and where the recovery stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastic.choose import Choice
from elastic.copy_check import CopyCheck
from elastic.events import Phase, SnapshotSummary, WorkerState
from elastic.members import host_of, label_of, name_of
from elastic.quarantine import Flapping
from elastic.repeated_deaths import Deaths
from elastic.shadow import Shadow
from elastic.step_watch import StepWatch
from elastic.stragglers import StragglerRule
from elastic.timing import Timing as Timing
from reshard.batch_sizes import NewSteps
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What does not change during a job."""

    num_slices: int
    hosts_per_slice: int = 1
    spares: int = 0
    """Slices beyond these that wait for one of them to be lost."""
    min_slices: int = 1
    devices_per_host: int = 1
    replicas: int = 2
    rejoin_after_steps: int | None = 0
    """Steps to commit after a loss before the lost slice is started again; None: never."""
    rehearsals: int = 1
    """How many smaller worlds run one step before the start, to put their programs into the compile cache."""
    persists: bool = False
    """Whether snapshots go to a persistent tier; the one of the last step does, before the job ends."""
    audit_every: int = 50
    """Captures from one audit of all copies on the devices to the next; 0: only when copies disagreed."""
    on_corruption: Literal["throw-out", "warn"] = "throw-out"
    """What is done about a slice whose copies of the state a majority finds wrong."""
    count_writes: bool = False
    """Whether every restore counts that each element is written exactly once (for debugging)."""
    precompile: bool = False
    """Whether the programs of the next smaller and larger world are compiled while a world trains."""
    keeps_runtime: bool = False
    plays_alone: bool = False
    """Whether who is left after a loss goes on in the runtime it is connected with, where that can be."""
    max_deaths_at_step: int = 3
    """How many worlds in a row may have a worker killed at the same step before the job is ended."""
    max_starts: int = 8
    """How often a slice's worker is started without a new step before the slice is left out."""
    timing: Timing = field(default_factory=Timing)
    stragglers: StragglerRule = field(default_factory=StragglerRule)
    """When a slice counts as slower than the others."""
    flapping: Flapping = field(default_factory=Flapping)
    """How long slices that are lost again and again are kept away."""

    def __post_init__(self) -> None:
        if self.num_slices < 1:
            raise UsageError(f"slices must be at least 1, not {self.num_slices}")
        if self.hosts_per_slice < 1:
            raise UsageError(f"hosts-per-slice must be at least 1, not {self.hosts_per_slice}")
        if self.spares < 0:
            raise UsageError(f"spares must be 0 or more, not {self.spares}")
        if not 1 <= self.min_slices <= self.num_slices:
            raise UsageError(f"min-slices must be between 1 and {self.num_slices}, not {self.min_slices}")
        if self.replicas < 1:
            raise UsageError(f"replicas must be at least 1, not {self.replicas}")
        if self.max_deaths_at_step < 1:
            raise UsageError(f"max-deaths-at-step must be at least 1, not {self.max_deaths_at_step}")
        if self.audit_every < 0:
            raise UsageError(f"audit-every must be 0 or more, not {self.audit_every}")

    @property
    def num_members(self) -> int:
        """The hosts of all slices, of the spares too."""
        return self.num_all_slices * self.hosts_per_slice

    @property
    def num_all_slices(self) -> int:
        """All slices of the job, the spares too."""
        return self.num_slices + self.spares

    def host(self, member: int) -> HostId:
        """The host that is this member."""
        return host_of(member, self.hosts_per_slice)

    def slice_of(self, member: int) -> int:
        """The index of the slice that a member belongs to."""
        return member // self.hosts_per_slice

    def members_of(self, slice_index: int) -> tuple[int, ...]:
        """The members of a slice, in the order of their hosts."""
        first = slice_index * self.hosts_per_slice
        return tuple(range(first, first + self.hosts_per_slice))

    def name(self, member: int) -> str:
        """A member for a sentence: its slice, and its host where a slice has several."""
        return name_of(self.host(member), self.hosts_per_slice)

    def label(self, member: int) -> str:
        """A member in the name of a file."""
        return label_of(self.host(member), self.hosts_per_slice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One host as the coordinator sees it, under its number."""

    index: int
    attached: bool = False
    gone_since_s: float | None = None
    """When its agent was lost; None while attached, or once the slice has been counted as lost."""
    worker: WorkerState = WorkerState.NONE
    worker_pid: int = 0
    agent_pid: int = 0
    ended_pid: int = 0
    """The process before this one, which is counted as gone: news of it changes nothing."""
    starts: int = 0
    """Starts of its worker since it last took part in a new step."""
    hint_at_s: float | None = None
    """When it is told that a starting worker is not there yet; None: it was, or none starts."""
    start_by_s: float | None = None
    """When a starting worker has to be ready."""
    start_at_step: int | None = None
    """The newest committed step at which a new worker may be started; None: not planned."""
    prepare_by_s: float | None = None
    """When its host has to have made room for a part in the world; None: it was not told to."""
    prepared: bool = False
    """Whether it has."""
    joined_s: float | None = None
    """When its worker got its part in a world; None since the slice was lost."""
    losses_in_row: int = 0
    """Losses of it, each soon after it had joined."""
    quarantined_until_s: float | None = None
    """Until when it gets no other worker while a world runs without it."""
    fenced: bool = False
    """Whether it has reported for the current generation."""
    snapshots: tuple[SnapshotSummary, ...] = ()
    done: bool = False
    """Whether it has done what the current phase asks of it (staged, rebuilt)."""
    left: bool = False
    """Whether its worker stopped at a step boundary, as told, and waits to be fenced."""
    finished: bool = False
    leaving: bool = False
    respawning: bool = False
    fresh: bool = True
    """Whether its worker has not been in any world yet."""
    last_life_unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisting:
    """A snapshot on its way into the persistent tier: which members still write their share of it (none: it
    is being put together, by the agent of member `finisher`). `began_s` is of the machine's clock.
    """

    generation: int
    step: int
    began_s: float
    missing: frozenset[int]
    finisher: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """All that the machine knows. `world` are the members of the current (or forming) world, in rank order:
    all hosts of its slices, slice by slice.
    """

    config: Config
    members: tuple[Member, ...]
    phase: Phase = Phase.WAITING
    generation: int = 0
    deadline_s: float | None = None
    waiting_until_s: float | None = None
    """The bound of all the waiting since the last world was formed."""
    gather_until_s: float | None = None
    uncovered: str = ""
    """Why the hosts at hand cannot restore the state; cleared when another host attaches."""
    seats: tuple[int, ...] = ()
    """The slice at each logical index (`elastic.seats`); those without a seat are spares."""
    world: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    """Slices that were there when the world was formed and have no part in it: its layout takes fewer."""
    layouts: tuple[tuple[int, Layout], ...] = ()
    """How the script lays out the state on so many slices, as worlds (and rehearsals) of them have told."""
    shadow: Shadow = field(default_factory=Shadow)
    """Where the compiling for the next world stands."""
    rehearsing: bool = False
    rehearsals_left: int = 0
    started: bool = False
    """Whether a real world (no rehearsal) has been formed yet."""
    newest_committed: int = -1
    newest_before: int = -1
    """The newest committed step when the current recovery began: a step beyond it is new."""
    restored_steps: tuple[tuple[int, int], ...] = ()
    """Generation and step of every restore that went as far as the workers (-1: a fresh state)."""
    new_steps: tuple[NewSteps, ...] = ()
    """Which world was the first to make each step, for how many samples it takes when it is run again."""
    world_generation: int = 0
    """The generation of the newest world that was decided."""
    choice: Choice | None = None
    copies: CopyCheck = field(default_factory=CopyCheck)
    """What is known of the copies of this world's captures on different slices."""
    runtime_generation: int = 0
    """The generation whose service the workers of the newest world are connected with."""
    runtime_is_up: bool = False
    """Whether all of the newest world are connected, and may go on so among fewer."""
    runtime_refusals: int = 0
    """How often the first step in a kept runtime failed."""
    service_generation: int = 0
    service_address: str = ""
    overtime: bool = False
    """Whether the first bound of the fencing has passed, and who was still inside is being replaced."""
    joining: bool = False
    stop_step: int | None = None
    suspect_error: str = ""
    unprobed: frozenset[int] = frozenset()
    """Members whose step failed and whose devices have not been probed yet."""
    unexplained_at: int | None = None
    """The step at which a failure without a loss was last seen; a second one there ends the job."""
    deaths: Deaths = field(default_factory=Deaths)
    """Workers killed at one step, in worlds that came one after the other."""
    watch: StepWatch = field(default_factory=StepWatch)
    stage_failures: int = 0
    finished_step: int | None = None
    finish_by_s: float | None = None
    """When all of the world must have finished, once one has."""
    captured_digest: tuple[int, int, str] | None = None
    """Generation, step and digest of the snapshot that the world of this generation was restored from."""
    restored_digest: tuple[int, int, str] | None = None
    final_digest: str | None = None
    digesting: bool = False
    persisting: tuple[Persisting, ...] = ()
    """Snapshots on their way into the persistent tier, of different steps."""
    persist_settled_step: int = -1
    """What comes of this step and older ones is too late; of the present generation, as the two below are."""
    persist_left_out_step: int = -1
    persisted: tuple[SnapshotSummary, ...] = ()
    """The snapshots in the persistent tier (without holdings); what earlier runs left has generation 0."""
    persist_failed_step: int = -1
    """The newest step that did not get into the persistent tier."""
    memory_given_up: bool = False
    """Whether hosts that are away, and may hold the state in memory, are not waited for any more."""
    reconvening: bool = False
    """Whether the agents of the coordinator before this one may still be on their way to it."""
    last_cause: str = ""
    """What ended a worker last, for the message of a job that cannot go on."""
    error: str = ""

    def member(self, index: int) -> Member:
        """The record of one member. Raises UsageError for one that this job does not have."""
        if not 0 <= index < len(self.members):
            last = len(self.members) - 1
            what = "slice" if self.config.hosts_per_slice == 1 else "host number"
            raise UsageError(f"there is no {what} {index}: the job has {what}s 0 to {last}")
        return self.members[index]

    def with_member(self, index: int, **changes: Any) -> JobState:
        """The state with these fields of one member changed."""
        changed = replace(self.member(index), **changes)
        return replace(self, members=(*self.members[:index], changed, *self.members[index + 1 :]))

    def with_members(self, **changes: Any) -> JobState:
        """The state with these fields changed in every member."""
        return replace(self, members=tuple(replace(member, **changes) for member in self.members))

    def members_with(self, worker: WorkerState) -> tuple[int, ...]:
        """The attached members whose worker is in this state."""
        return tuple(m.index for m in self.members if m.attached and m.worker is worker)

    def whole(self, members: Iterable[int]) -> tuple[int, ...]:
        """The slices all of whose members are among these: a part of a slice takes part in nothing."""
        there = Counter(map(self.config.slice_of, set(members)))
        return tuple(sorted(index for index, num in there.items() if num == self.config.hosts_per_slice))

    def spares(self) -> frozenset[int]:
        """The members whose worker is ready, while another host of their slice is lost."""
        ready = self.members_with(WorkerState.READY)
        complete = set(self.whole((*ready, *self.world)))
        return frozenset(index for index in ready if self.config.slice_of(index) not in complete)

    @property
    def world_slices(self) -> tuple[int, ...]:
        """The slices of the world, in rank order."""
        return tuple(dict.fromkeys(map(self.config.slice_of, self.world)))

    def held(self) -> dict[HostId, tuple[SnapshotSummary, ...]]:
        """The snapshots in the memory of every host at hand, with or without a worker."""
        return {self.config.host(m.index): m.snapshots for m in self.members if m.attached}

    def held_by_world(self) -> dict[HostId, tuple[SnapshotSummary, ...]]:
        """The snapshots in the memory of the world's hosts."""
        return {self.config.host(index): self.member(index).snapshots for index in self.world}

    @property
    def is_finishing_persist(self) -> bool:
        """Whether a snapshot, all of it written, is just being put together in the persistent tier."""
        return any(not under_way.missing for under_way in self.persisting)

    def is_persist_settled(self, step: int) -> bool:
        """Whether the snapshot of `step` is in the persistent tier, or will not get there."""
        is_there = any(snapshot.step == step for snapshot in self.persisted)
        return not self.config.persists or is_there or self.persist_failed_step >= step

    def all_finished(self) -> bool:
        """Whether every training loop of the world has come to its end."""
        return bool(self.world) and all(self.member(index).finished for index in self.world)


def initial_state(config: Config, now_s: float) -> JobState:
    """A job that waits for its agents."""
    members = tuple(Member(index=index, start_at_step=-1) for index in range(config.num_members))
    rehearsals = min(config.rehearsals, config.num_slices - config.min_slices)
    return JobState(
        config=config,
        members=members,
        copies=CopyCheck(hosts_per_slice=config.hosts_per_slice),
        seats=tuple(range(config.num_slices)),
        rehearsals_left=max(rehearsals, 0),
        deadline_s=now_s + config.timing.start_s,
        waiting_until_s=now_s + config.timing.start_s,
    )
