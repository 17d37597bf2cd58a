"""What detectors tell the recovery state machine, and what it asks of them; `elastic.events` passes it on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A step raised an error that may come from a lost peer.

    Told twice if no loss explains it soon: the second time with what a probe of the slice's own devices
    found, "" if they are well. `devices` is None as long as they have not been probed.
    """

    member: int
    generation: int
    error: str
    devices: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStacks:
    """No step ends in time: let the worker write its threads' stacks to a file, and tell where it is."""

    member: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksTaken:
    """Where a worker's main thread is: in the script's own code, or (`in_script` False) waiting in the
    runtime. `where` names the function, for people.
    """

    member: int
    generation: int
    in_script: bool
    where: str
