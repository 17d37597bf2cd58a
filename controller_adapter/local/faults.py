"""Simulated faults: what can happen to a virtual slice.

For notebooks: `inject("kill", 1)` acts on the session of this process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from reshard.errors import UsageError

KINDS: dict[str, str] = {
    "kill": "the slice is out of the world from the loop's next call on, its snapshot memory is gone",
    "stop": "the slice sends no heartbeat and the loop's next call waits for it, until it is given up",
    "term": "the slice is told to leave, and does at a step boundary",
    "host": "as kill: a virtual slice and its host are one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    """A fault on its way into the engine, with the moments (Unix, monotonic) at which it was caused."""

    kind: str
    slices: tuple[int, ...]
    unix_s: float
    mono_s: float


class Asked(Protocol):
    """A fault of the chaos tooling, as far as it is looked at here."""

    @property
    def kind(self) -> str:
        """What happens."""
        ...

    @property
    def target(self) -> str:
        """To whom: `slice=1`, say, or `agent=1`."""
        ...


def check_faults(faults: Iterable[Asked]) -> None:
    """Raise UsageError for a fault that means nothing in one process."""
    faults = list(faults)
    check_kinds(fault.kind for fault in faults)
    for fault in faults:
        if not fault.target.startswith("slice="):
            raise UsageError(
                f"the local adapter cannot simulate {fault.kind} of {fault.target}: it has no such process",
                remedy="Strike a slice, or use --adapter multicontroller, where faults are real.",
            )


def check_kinds(kinds: Iterable[str]) -> None:
    """Raise UsageError for a kind of fault that means nothing in one process."""
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(
                f"the local adapter cannot simulate the fault {kind!r}: it has {', '.join(KINDS)}",
                remedy="Use one of these, or --adapter multicontroller, where faults are real.",
            )


def inject(kind: str, *slices: int) -> None:
    """Cause a fault in the local session of this process; it takes effect at the training loop's next call.

    Raises UsageError for an unknown kind or slice, or without a session.
    """
    from controller_adapter.local.connect import live_engine

    engine = live_engine()
    if engine is None:
        raise UsageError("there is no local session in this process", remedy="Open elastic.session() first.")
    engine.inject(kind, slices, note=True)
