"""What was refused, counted: who called at which surface of a job, and why it was not let in.

Everything refused is counted; not everything is written down, or a stranger could fill the disk: of a kind
the first few, then each time their number has doubled, and at the end the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from elastic.records import MessageRefused
from reshard.errors import UsageError

Surface = Literal["control", "worker-socket", "data-plane"]
WRITTEN_SINGLY = 8
MAX_SENDER_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalsTold:
    """An agent has refused so many callers since it last told; `sender` is the last of them."""

    surface: Surface
    reason: str
    sender: str
    num: int

    def __post_init__(self) -> None:
        if self.num < 1:
            raise UsageError(f"at least one refusal is told, not {self.num}")


def count_refused(records: Iterable[MessageRefused]) -> dict[str, dict[str, int]]:
    """How many refusals the records stand for, by surface and cause."""
    counts: dict[str, dict[str, int]] = {}
    for record in records:
        of_surface = counts.setdefault(record.surface, {})
        of_surface[record.cause] = of_surface.get(record.cause, 0) + record.num
    return counts


class RefusalTally:
    """An agent's count of what its surfaces refuse, until it tells the coordinator. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[Surface, str], tuple[int, str]] = {}

    def count(self, surface: Surface, reason: str, sender: str) -> None:
        """One caller was refused."""
        with self._lock:
            num, _ = self._counts.get((surface, reason), (0, ""))
            self._counts[surface, reason] = (num + 1, sender)

    def take(self) -> tuple[RefusalsTold, ...]:
        """What has been counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return tuple(
            RefusalsTold(surface=surface, reason=reason, sender=sender, num=num)
            for (surface, reason), (num, sender) in counts.items()
        )


class RefusalLedger:
    """The coordinator's account of all refusals in the job: what of them goes into the history. Safe for
    threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num: dict[tuple[str, str], int] = {}
        self._unwritten: dict[tuple[str, str], MessageRefused] = {}

    def take(self, refused: MessageRefused) -> MessageRefused | None:
        """Count refusals; return the record to write now (with those since the last one), or None."""
        kind = (refused.surface, refused.cause)
        with self._lock:
            before = self._num.get(kind, 0)
            self._num[kind] = before + refused.num
            waiting = self._unwritten.pop(kind, None)
            pending = replace(
                refused,
                sender=refused.sender[:MAX_SENDER_CHARS],
                num=refused.num + (0 if waiting is None else waiting.num),
            )
            if before < WRITTEN_SINGLY or self._num[kind] >= 2 * (self._num[kind] - pending.num):
                return pending
            self._unwritten[kind] = pending
            return None

    def rest(self) -> Iterable[MessageRefused]:
        """The records of what was counted and not written yet, for the end of the history."""
        with self._lock:
            rest, self._unwritten = tuple(self._unwritten.values()), {}
        return rest

    def counts(self) -> dict[str, dict[str, int]]:
        """How many were refused, by surface and kind of reason."""
        counts: dict[str, dict[str, int]] = {}
        with self._lock:
            for (surface, kind), num in sorted(self._num.items()):
                counts.setdefault(surface, {})[kind] = num
        return counts
