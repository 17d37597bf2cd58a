"""The catalogue: each kind of fault with what it does, whom it may strike and how it heals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["slice", "agent", "spare", "coordinator", "service"]

ROLES: dict[Role, str] = {
    "slice": "the worker of a slice: the training process",
    "agent": "the agent of a slice's host; its supervisor starts another, which adopts worker and memory",
    "spare": "the warm spare on a slice's host: a process that waits to take a worker's place",
    "coordinator": "the job's coordinator",
    "service": "the runtime service of the present world (JAX's coordination service)",
}
"""Whom a fault may strike; the first three are of slices, the others there is one of."""
OF_SLICES: tuple[Role, ...] = ("slice", "agent", "spare")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault."""

    name: str
    does: str
    heals: str
    needs: str
    roles: tuple[Role, ...] = ("slice", "agent", "spare", "coordinator", "service")
    may_heal: bool = False
    """Whether `heal=SECONDS` means anything for it."""


_ALL = (
    FaultKind(
        name="kill",
        does="SIGKILL of the process",
        heals="by itself: whoever supervises the process starts another",
        needs="real processes",
    ),
    FaultKind(
        name="stop",
        does="SIGSTOP of the process: it hangs, its sockets stay open",
        heals="with heal=S by SIGCONT after S seconds; else never",
        needs="real processes",
        may_heal=True,
    ),
    FaultKind(
        name="term",
        does="SIGTERM of the process: of a worker, a preemption with grace; of others, the word to end",
        heals="by itself: whoever supervises the process starts another",
        needs="real processes",
    ),
    FaultKind(
        name="host",
        does="a whole host at once: agent, worker, spare, all processes below them, and snapshot memory",
        heals="by itself: another agent is started on the host",
        needs="real processes",
        roles=("slice",),
    ),
)
KINDS: dict[str, FaultKind] = {kind.name: kind for kind in _ALL}
