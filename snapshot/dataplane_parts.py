"""What a fetch consists of: goals, the parts they are fetched in, and what each source holds of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from reshard.boxes import Box
from reshard.errors import ElasticError


@dataclass(eq=False, slots=True)
class Goal:
    """One box to fetch, into `view`; `live` are the sources that may still have it."""

    path: str
    box: Box
    view: memoryview
    live: list[str]
    is_done: bool = False
    digest: int = 0
    round: int = 0
    """Grows when all of it is fetched again: what came before does not count."""
    verify: bool = False
    """Whole, from one source, which reads its copy first: after bytes that did not match."""
    num_open: int = 0
    """Parts that are queued or held."""
    num_held: int = 0
    expected: dict[str, int] = field(default_factory=dict)
    """The checksum of the whole box, by the sources that sent one."""
    errors: list[ElasticError] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Part:
    """Bytes [start, stop) of a goal, of which the first `done_bytes` are there, lastly from `source`."""

    goal: Goal
    start: int
    stop: int
    round: int
    done_bytes: int = 0
    source: str = ""
    avoid: set[str] = field(default_factory=set)
    """Sources it was taken from, as they were slow."""

    @property
    def left_bytes(self) -> int:
        """Bytes still to come."""
        return self.stop - self.start - self.done_bytes


@dataclass(eq=False, slots=True)
class Held:
    """What a source is busy with; `cut` breaks its connection."""

    parts: list[Part]
    since_s: float
    cut: Callable[[], None]
    got_bytes: int = 0
    was_cut: bool = False
