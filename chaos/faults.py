"""Faults as data: what happens, to whom, when. `KIND:slice=1@step=60` on the command line.

Where a slice has several hosts, `KIND:slice=1,host=0@step=60` is for one of them, else all are hit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import UsageError

KINDS: dict[str, str] = {
    "kill": "SIGKILL of a slice's worker",
    "stop": "SIGSTOP of a slice's worker: it hangs, its sockets stay open",
    "term": "SIGTERM of a slice's worker: a preemption with grace",
    "agent": "SIGKILL of a slice's agent; the launcher starts another, which adopts worker and arena",
    "host": "a whole host at once: worker, agent and snapshot memory",
}
PHASES = ("SUSPECT", "FENCING", "PLANNING", "RESTORING", "REBUILDING", "REPLAYING")

_FORM = re.compile(
    r"(?P<kind>[a-z]+):slice=(?P<slice>\d+(?:\+\d+)*)(?:,host=(?P<host>\d+))?@(?P<when>step|phase)=(?P<value>\w+)"
)
EXAMPLE = "kill:slice=1@step=60"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: `kind` happens to `slices` at once while `step` runs, or as soon as a recovery enters
    `phase`. To one `host` of each, or (None) to all of them.
    """

    kind: str
    slices: tuple[int, ...]
    step: int | None = None
    phase: str | None = None
    host: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"no fault is called {self.kind!r} (there are {', '.join(KINDS)})")
        if (self.step is None) == (self.phase is None):
            raise UsageError("a fault happens either at a step or at a phase")
        if self.step is not None and self.step < 0:
            raise UsageError(f"a fault at step {self.step}: steps count from 0")
        if self.phase is not None and self.phase not in PHASES:
            raise UsageError(f"no phase is called {self.phase!r} (there are {', '.join(PHASES)})")

    def __str__(self) -> str:
        when = f"step={self.step}" if self.phase is None else f"phase={self.phase}"
        host = "" if self.host is None else f",host={self.host}"
        return f"{self.kind}:slice={'+'.join(map(str, self.slices))}{host}@{when}"


def parse_fault(text: str, num_slices: int, hosts_per_slice: int = 1) -> Fault:
    """The fault that `text` describes. Raises UsageError for another form, an unknown kind, a slice or host
    that is not there.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no fault", remedy=f"Write it like {EXAMPLE}.")
    slices = tuple(int(index) for index in match["slice"].split("+"))
    for index in slices:
        if index >= num_slices:
            raise UsageError(f"{text}: there is no slice {index}, the slices are 0 to {num_slices - 1}")
    host = None if match["host"] is None else int(match["host"])
    if host is not None and host >= hosts_per_slice:
        last = hosts_per_slice - 1
        raise UsageError(f"{text}: there is no host {host} in a slice, the hosts are 0 to {last}")
    if match["when"] == "phase":
        return Fault(kind=match["kind"], slices=slices, host=host, phase=match["value"].upper())
    if not match["value"].isdecimal():
        raise UsageError(f"{text}: {match['value']!r} is no step")
    return Fault(kind=match["kind"], slices=slices, host=host, step=int(match["value"]))


def parse_faults(texts: Sequence[str], num_slices: int, hosts_per_slice: int = 1) -> tuple[Fault, ...]:
    """The faults of a command line; `none` alone means none."""
    if list(texts) == ["none"]:
        return ()
    return tuple(parse_fault(text, num_slices, hosts_per_slice) for text in texts)
