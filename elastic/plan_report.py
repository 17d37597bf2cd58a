"""What `elastic plan` answers, as values: also what `--json` prints (schema 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from reshard.boxes import Box
from reshard.choice_figures import Candidate
from reshard.cost import Phase

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The cluster and the model in numbers; bytes are those of the state, each array counted once."""

    accelerator: str
    slices: int
    hosts: int
    devices: int
    mesh: dict[str, int]
    arrays: int
    state_bytes: int
    figures: dict[str, float | None]
    sources: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What snapshots take of a host's memory, on the fullest host; `limit_bytes` is what there is, if known.

    `captured_bytes` and `copies_bytes` (for other slices) are those of one snapshot, kept in so many slots;
    `stage_bytes` is room for what a recovery fetches; `persisted_bytes` for a snapshot on its way to disk.
    """

    slots: int
    captured_bytes: int
    copies_slots: int
    copies_bytes: int
    stage_bytes: int
    persisted_bytes: int
    limit_bytes: float | None
    total_bytes: int = field(init=False)
    fits: bool | None = field(init=False)
    """None when it is not known what there is."""

    def __post_init__(self) -> None:
        own_bytes = self.slots * self.captured_bytes + self.persisted_bytes
        total_bytes = own_bytes + self.copies_slots * self.copies_bytes + self.stage_bytes
        object.__setattr__(self, "total_bytes", total_bytes)
        object.__setattr__(self, "fits", _fits(total_bytes, self.limit_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The state on the fullest device, times what it needs beside it, against the device's memory."""

    state_bytes: int
    state_factor: float
    limit_bytes: float | None
    total_bytes: float = field(init=False)
    fits: bool | None = field(init=False)
    """None when it is not known what there is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_bytes", self.state_bytes * self.state_factor)
        object.__setattr__(self, "fits", _fits(self.total_bytes, self.limit_bytes))


def _fits(total_bytes: float, limit_bytes: float | None) -> bool | None:
    return None if limit_bytes is None else total_bytes <= limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The network bytes of one host."""

    host: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """State that a loss takes for good: no other slice has this box of this array."""

    path: str
    box: Box
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The step on the new layout: its compute beside that of the whole cluster; seconds where known."""

    ratio: float
    seconds: float | None
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a change moves, and how long it takes; `downtime_s` is the sum of the phases that are known."""

    bytes_moved: int
    bytes_lower_bound: int
    bytes_local: int
    busiest_source: Load | None
    busiest_target: Load | None
    phases: tuple[Phase, ...]
    step: Step
    host_memory: HostMemory
    device_memory: DeviceMemory
    downtime_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "downtime_s", sum(phase.seconds or 0.0 for phase in self.phases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one change of topology leads to: slices lost, or (`return`) come back.

    `move` is there when the job goes on. Else `missing` says what is gone, or `reason` why it waits, or why
    no layout is possible. `candidates` are the layouts that came into question, the chosen one first;
    `explanation` tells of them in words.
    """

    event: Literal["loss", "return"]
    slices: tuple[int, ...]
    verdict: Literal["goes on", "state is gone", "waits", "no layout"]
    candidates: tuple[Candidate, ...] = ()
    explanation: str = ""
    move: Move | None = None
    missing: Missing | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The whole answer. `only_checked` are single losses that were checked for state gone, but not planned.

    The notes say what a number rests on, or what is missing where there is none.
    """

    schema: int
    title: str
    described: Described
    host_memory: HostMemory
    device_memory: DeviceMemory
    step: Step
    step_note: str
    outcomes: tuple[Outcome, ...]
    only_checked: tuple[int, ...]
    goodput: float | None
    goodput_note: str
    is_sound: bool = field(init=False)
    """Whether no loss takes state with it or leaves no layout, and all that is known of memory does."""

    def __post_init__(self) -> None:
        memories: list[HostMemory | DeviceMemory] = [self.host_memory, self.device_memory]
        for outcome in self.outcomes:
            if outcome.move is not None:
                memories += [outcome.move.host_memory, outcome.move.device_memory]
        is_going_on = all(outcome.verdict in ("goes on", "waits") for outcome in self.outcomes)
        has_room = all(memory.fits is not False for memory in memories)
        object.__setattr__(self, "is_sound", is_going_on and has_room)
