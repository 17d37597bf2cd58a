"""What the injectors may aim at: the processes and memory of one job, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from elastic.records import FaultInjected


class Targets(Protocol):
    """A job of real processes. Each pid is None where there is no such process just now.

    A member is a host's number (`elastic.members`).
    """

    @property
    def hosts_per_slice(self) -> int:
        """How many hosts each slice has."""
        ...

    def worker_pid(self, member: int) -> int | None:
        """The process of a host's worker."""
        ...

    def agent_pid(self, member: int) -> int | None:
        """The process of a host's agent."""
        ...

    def spare_pid(self, member: int) -> int | None:
        """The process of a host's warm spare."""
        ...

    def coordinator_pid(self) -> int | None:
        """The process of the coordinator."""
        ...

    def service_pid(self) -> int | None:
        """The process of the runtime service of the present world."""
        ...

    def arena(self, member: int) -> Path:
        """The snapshot memory of a host."""
        ...

    def note(self, fault: FaultInjected) -> None:
        """Have a fault written into the history. Raises when nobody is there who could."""
        ...


@runtime_checkable
class SimulatedTargets(Protocol):
    """A job without processes to aim at: it makes faults happen to its virtual slices itself."""

    def simulate(self, kind: str, slices: tuple[int, ...]) -> None:
        """Let a fault happen to these slices at once."""
        ...

    def note(self, fault: FaultInjected) -> None:
        """Have a fault written into the history."""
        ...
