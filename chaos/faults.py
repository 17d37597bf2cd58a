"""Faults as data: what happens, to whom, when, and how it heals; and how a command line says it.

    KIND:TARGET@WHEN[,round=K][,heal=SECONDS]

    TARGET  slice=1  slice=0+2  slice=1,host=0  agent=1  spare=1  coordinator  service
    WHEN    step=60  phase=FENCING  phase=REPLAYING,nth=2

A *round* begins when the world is whole: the first one with the first world, the next one when all slices are
back after a loss. A fault of round K waits for it, and counts steps and recoveries from there: so several
faults, and what they lead to, come one after the other in one run, however long each takes.

`kill:slice=1@step=60` is SIGKILL of slice 1's worker while step 60 runs; docs/chaos.md has them all. Where a
slice has several hosts, `slice=1,host=0` is for one of them, else all are hit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from chaos.catalogue import KINDS, OF_SLICES, ROLES, Role
from reshard.errors import UsageError

PHASES = ("SUSPECT", "FENCING", "PLANNING", "RESTORING", "REBUILDING", "REPLAYING")
JOINING = "JOINING"
"""No phase of the recovery: the moment at which a lost slice's worker has been started again."""
EXAMPLE = "kill:slice=1@step=60"

_FORM = re.compile(
    r"(?P<kind>[a-z]+):(?P<role>[a-z]+)(=(?P<slices>\d+(\+\d+)*)(,host=(?P<host>\d+))?)?"
    r"@(?P<when>step|phase)=(?P<value>\w+)(?P<options>(,\w+=[\w.]+)*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """At a moment of a seed's choice while this step runs; with a `round`, so many steps after its begin."""

    step: int
    round: int | None = None

    def __post_init__(self) -> None:
        _check_round(self.round)
        if self.step < 0:
            raise UsageError(f"a fault at step {self.step}: steps count from 0")

    def __str__(self) -> str:
        return f"step={self.step}{_round_text(self.round)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtPhase:
    """As soon as a recovery enters this phase: the first one that does, or the `nth` (from 1), of the run or
    of the `round`.
    """

    phase: str
    nth: int | None = None
    round: int | None = None

    def __post_init__(self) -> None:
        _check_round(self.round)
        if self.phase not in (*PHASES, JOINING):
            raise UsageError(f"no phase is called {self.phase!r} (there are {', '.join((*PHASES, JOINING))})")
        if self.nth is not None and self.nth < 1:
            raise UsageError(f"nth={self.nth}: recoveries count from 1")

    def __str__(self) -> str:
        nth = "" if self.nth is None else f",nth={self.nth}"
        return f"phase={self.phase}{nth}{_round_text(self.round)}"


def _check_round(number: int | None) -> None:
    if number is not None and number < 1:
        raise UsageError(f"round={number}: rounds count from 1")


def _round_text(number: int | None) -> str:
    return "" if number is None else f",round={number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: `kind` happens to the processes of `role`, of these slices at once, at a moment, and is
    healed `heal_s` later (None: by nobody but the job's own supervision). To one `host` of each slice, or
    (None) to all of them.
    """

    kind: str
    role: Role = "slice"
    slices: tuple[int, ...] = ()
    at: AtStep | AtPhase
    heal_s: float | None = None
    host: int | None = None

    def __post_init__(self) -> None:
        known = KINDS.get(self.kind)
        if known is None:
            raise UsageError(f"no fault is called {self.kind!r} (there are {', '.join(KINDS)})")
        if self.role not in ROLES:
            raise UsageError(f"nobody is called {self.role!r} (there are {', '.join(ROLES)})")
        if self.role not in known.roles:
            raise UsageError(f"{self.kind} strikes {', '.join(known.roles)}, not {self.role}")
        if (self.role in OF_SLICES) != bool(self.slices):
            remedy = f"{self.role}=N" if self.role in OF_SLICES else f"{self.role} alone"
            raise UsageError(f"{self.kind}:{self.role} needs to say which slice, or must not: {remedy}")
        if self.heal_s is not None and not known.may_heal:
            raise UsageError(f"{self.kind} cannot be healed: {known.heals}")
        if self.heal_s is not None and not self.heal_s > 0:
            raise UsageError(f"heal={self.heal_s:g}: it heals after more than 0 s")

    @property
    def target(self) -> str:
        """Whom it strikes, as it is written."""
        host = "" if self.host is None else f",host={self.host}"
        return self.role + (f"={'+'.join(map(str, self.slices))}{host}" if self.slices else "")

    def __str__(self) -> str:
        healing = "" if self.heal_s is None else f",heal={self.heal_s:g}"
        return f"{self.kind}:{self.target}@{self.at}{healing}"


def parse_fault(text: str, num_slices: int, hosts_per_slice: int = 1) -> Fault:
    """The fault that `text` describes. Raises UsageError for another form, an unknown kind, a slice or host
    that is not there.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no fault", remedy=f"Write it like {EXAMPLE}.")
    slices = tuple(sorted({int(index) for index in (match["slices"] or "").split("+") if index}))
    for index in slices:
        if index >= num_slices:
            raise UsageError(f"{text}: there is no slice {index}, the slices are 0 to {num_slices - 1}")
    kind, role = match["kind"], match["role"]
    if (kind, role) == ("agent", "slice"):  # as it was written before agents were targets
        kind, role = "kill", "agent"
    host = None if match["host"] is None else int(match["host"])
    if host is not None and host >= hosts_per_slice:
        last = hosts_per_slice - 1
        raise UsageError(f"{text}: there is no host {host} in a slice, the hosts are 0 to {last}")
    heal_s, nth, round_ = _options(text, match["options"])
    at: AtStep | AtPhase
    if match["when"] == "phase":
        at = AtPhase(phase=match["value"].upper(), nth=nth, round=round_)
    elif not match["value"].isdecimal():
        raise UsageError(f"{text}: {match['value']!r} is no step")
    elif nth is not None:
        raise UsageError(f"{text}: nth= is for phases, a step comes once")
    else:
        at = AtStep(step=int(match["value"]), round=round_)
    return Fault(kind=kind, role=cast("Role", role), slices=slices, host=host, at=at, heal_s=heal_s)


def _options(text: str, written: str) -> tuple[float | None, int | None, int | None]:
    heal_s, nth, round_ = None, None, None
    for option in written.split(",")[1:]:
        name, _, value = option.partition("=")
        try:
            if name == "heal":
                heal_s = float(value.removesuffix("s"))
            elif name == "nth":
                nth = int(value)
            elif name == "round":
                round_ = int(value)
            else:
                raise UsageError(f"{text}: no option is called {name!r} (there are heal, nth, round)")
        except ValueError as error:
            raise UsageError(f"{text}: {value!r} is no value for {name}") from error
    return heal_s, nth, round_


def parse_faults(texts: Sequence[str], num_slices: int, hosts_per_slice: int = 1) -> tuple[Fault, ...]:
    """The faults of a command line; `none` alone means none."""
    if list(texts) == ["none"]:
        return ()
    return tuple(parse_fault(text, num_slices, hosts_per_slice) for text in texts)
