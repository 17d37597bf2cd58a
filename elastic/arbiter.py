"""Who may command a job: the port of the arbiter store, and the rules of claiming and of holding. Pure.

An *epoch* is a term of office: it comes by compare-and-swap from a store that all who might command can
reach, and every message of a coordinator carries it. No clocks of different machines are compared: a claimant
waits until a record has not changed for its lease by the claimant's own clock; a holder counts its lease from
before its last successful renewal began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reshard.errors import ElasticError, UsageError

FENCED_EXIT_STATUS = 76
"""The exit status of a coordinator that may command no more: another one holds the job, or it cannot tell."""


class FencedError(ElasticError):
    """This coordinator may not command any more."""

    kind = "fenced"
    remedy = "None: another coordinator holds the job, or is started."
    exit_status = FENCED_EXIT_STATUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """What the store has: whose term it is, and how often it has been renewed (`beat`).

    `machine` names the machine (and its boot) that the holder runs on; `lease_s` is what the holder promised
    to renew within.
    """

    epoch: int
    holder: str
    machine: str
    lease_s: float
    beat: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 1 or not self.lease_s > 0:
            raise UsageError(f"a term has an epoch from 1 on and a lease, not {self.epoch}, {self.lease_s}")


class ArbiterStore(Protocol):
    """A record of who holds the job. Every method may raise OSError or ElasticError when the store cannot be
    reached: then nothing is known, and nothing may be concluded.

    `claim` and `renew` exclude each other: when both start from the same record, at most one tells success.
    """

    def read(self) -> Tenure | None:
        """What is stored now; None when nobody has held the job yet."""
        ...

    def claim(self, seen: Tenure | None, lease_s: float) -> Tenure | None:
        """Begin the epoch after `seen`, if the store still has exactly `seen`; else None, nothing changed."""
        ...

    def renew(self, held: Tenure) -> Tenure | None:
        """Count the beat up, if no later epoch has begun; else None."""
        ...

    def is_holder_dead(self, seen: Tenure) -> bool:
        """Whether the holder of `seen` has provably ended. False when the store cannot prove it."""
        ...


class Watch:
    """A claimant's look at the store: tells when the holder must have stopped commanding."""

    def __init__(self) -> None:
        self._seen: Tenure | None = None
        self._since_s = 0.0

    def look(self, now: Tenure | None, now_s: float) -> bool:
        """Whether what is stored has not changed for the lease that it names; True when nothing is stored.

        `now_s` is a monotonic clock of this process, read *after* `now` came from the store.
        """
        if now is None:
            return True
        if now != self._seen:
            self._seen, self._since_s = now, now_s
            return False
        return now_s - self._since_s >= now.lease_s


def take_office(
    store: ArbiterStore, watch: Watch, clock_s: float, lease_s: float, seen: Tenure | None
) -> Tenure | None:
    """Claim the next epoch if `seen`, just read at `clock_s`, is over: dead, or out of its lease."""
    if watch.look(seen, clock_s) or (seen is not None and store.is_holder_dead(seen)):
        return store.claim(seen, lease_s)
    return None
