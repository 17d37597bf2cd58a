"""What coordinator and agents say to each other about shadow groups, which compile what is needed next.

See `elastic.moves_shadow`. `number` names a group for the whole job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowTold:
    """How a slice's process of a shadow group is: at its session; done, as its step ended; failed; or not
    started, for want of memory.
    """

    member: int
    number: int
    state: Literal["ready", "done", "failed", "skipped"]
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowServiceReady:
    """The adapter's runtime service of a shadow group listens at `address`, or could not be started."""

    number: int
    address: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartShadow:
    """Start a process for a shadow group, as far as its session."""

    member: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterShadow:
    """Let the process make one step in a world of these slices, in rank order, and drop it."""

    member: int
    number: int
    rank: int
    slices: tuple[int, ...]
    service_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndShadow:
    """End the process."""

    member: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartShadowService:
    """Start the runtime service of a shadow group of so many processes (for the coordinator's shell)."""

    number: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndShadowService:
    """End it."""

    number: int
