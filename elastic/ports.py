"""The ports of a session, declared by their consumer: adapters fill them.

`Link` connects a session with whoever decides (an agent and coordinator, or the local engine in the same
process); `Runtime` forms and drops a world's devices. Each has a contract suite in
`tests/elastic/contracts/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.events import WorldSpec
from elastic.job import JobSpec
from elastic.protocol import WorkerCommitted
from elastic.records import RunEnded
from reshard.errors import ElasticError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.arena import Arena
from snapshot.persist_tree import TreeDescription


class JobOver(ElasticError):
    """The job was stopped from outside, or failed elsewhere."""

    kind = "job-over"
    remedy = "See the run's report for the reason."


class WorldLost(ElasticError):
    """The world was given up while the loop was in it; `with world` ends quietly."""

    kind = "world-lost"
    remedy = "Let it leave the `with world` block: the next world goes on from the snapshot."


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a host's arena must have room for: slots and journal records of these sizes in bytes.

    `buddy_bytes` is the size of a slot for what the host keeps for other slices: 0 when it keeps nothing but
    other hosts do, None when no host of the world does.
    """

    slot_bytes: int
    journal_record_bytes: int
    journal_records: int
    buddy_bytes: int | None = None


class Link(Protocol):
    """How a session hears what to do and tells what it did."""

    def wait_world(self) -> WorldSpec | None:
        """Block until the next world is assigned; None when the job is complete. Raises JobOver when it was
        stopped.
        """
        ...

    def is_fenced(self, generation: int) -> bool:
        """Whether the world of `generation` has been given up."""
        ...

    def stop_step(self, generation: int) -> int | None:
        """The step after whose boundary to stop, None to go on."""
        ...

    def audit_step(self, generation: int) -> int | None:
        """The step whose capture, or the first one after it, is to be an audit; None without an order."""
        ...

    def wait_fenced(self, generation: int, timeout_s: float | None) -> bool:
        """Block until the world of `generation` is given up (True), or the time is over or the job complete
        (False).

        Raises JobOver when the job was stopped.
        """
        ...

    def arenas(self) -> Mapping[HostId, Arena]:
        """The snapshot memory of each host that this process serves."""
        ...

    def reserve(self, host: HostId, room: Room) -> None:
        """Make room in a host's arena. Raises InsufficientMemoryError."""
        ...

    def replicated_step(self, generation: int) -> int | None:
        """The newest step captured in `generation` whose copies the agents have put where they belong.

        -1 while there is none. None where nothing has to be waited for: then in every process of the
        world, from its beginning to its end. A capture overwrites the older slot only when all hosts have
        their copies of the newest. Must not block: it is asked between steps.
        """
        ...

    def rebuilt(
        self, generation: int, restored_step: int | None, form_s: float, restore_s: float, shm_bytes: int
    ) -> None:
        """Tell that the state is on the devices."""
        ...

    def laid_out(self, generation: int, layout: Layout, lacking: str = "") -> None:
        """Tell where each box of the world's state is (the first slice, for all).

        With `lacking`, that a box named there would be needed for this layout and is not here: the world is
        then given up for one that is planned for it.
        """
        ...

    def described(self, tree: TreeDescription) -> None:
        """Tell how the tree of the world's state looks, where the job has a persistent tier."""
        ...

    def captured(self, host: HostId, generation: int, step: int, checksums: bytes, *, is_audit: bool) -> None:
        """Tell the checksums of one host's capture, or audit, of a step; see `elastic.events.Captured`."""
        ...

    def committed(self, message: WorkerCommitted) -> None:
        """Tell that a step's outputs are ready and captured."""
        ...

    def left(self, generation: int) -> None:
        """Tell that the loop has stopped at a boundary as told, or has rehearsed."""
        ...

    def ended(self, generation: int, step: int) -> None:
        """Tell that the training loop has come to its end."""
        ...

    def step_failed(self, generation: int, error: str, devices: str | None = None) -> None:
        """Tell that a step failed in a way that a lost peer may explain; told again with what a probe found
        to be wrong with `devices` ("": nothing).
        """
        ...

    def user_failed(self, error: str, exit_status: int) -> None:
        """Tell that the user's code raised; the job ends with this status."""
        ...

    def rehearsed(self, generation: int, error: str) -> None:
        """Tell that a world that was played alone is left, and why before its end ("": it came to it)."""
        ...

    def unwound(self, generation: int) -> None:
        """Tell that the devices of every world before the newest generation are dropped."""
        ...


class Runtime(Protocol):
    """How an adapter makes the devices of a world."""

    def form(self, world: WorldSpec) -> Sequence[Any]:
        """Return the world's devices (`jax.Device`), those of a slice together, slices in rank order."""
        ...

    def host_of(self, device: Any) -> HostId:
        """The host that a device of the current world belongs to."""
        ...

    def drop(self) -> None:
        """Let go of the current world's devices; arrays on them are lost."""
        ...


class Adapter(Protocol):
    """One way to run worlds; found by its name among the entry points `elastic.adapters`."""

    name: str
    in_place: str
    """Whether a worker can leave a broken world and live on: "proven", "experimental" or "no"."""
    simulated_faults: bool
    one_process: bool
    """Whether all slices live in one worker process (no coordinator, no agents)."""
    # keeps_runtime: bool = False, may be left out
    # Whether who is left after a loss can go on in the runtime it is connected with; see `kept_runtime`.
    # plays_alone: bool = False, may be left out
    # Whether one process can form a world in which it plays all ranks; see `elastic.solo`.

    def service_command(self) -> tuple[str, ...]:
        """The command of the runtime service (see `elastic.runtime_service`); empty if none is needed."""
        ...

    def worker_environment(self, spec: JobSpec) -> dict[str, str]:
        """What the workers' environment needs before the runtime is imported."""
        ...

    def connect(self, spec: JobSpec, member: int) -> tuple[Link, Runtime]:
        """In a worker: the link and the runtime of its session."""
        ...


class JobLauncher(Protocol):
    """What runs one job on this machine to its end, and leaves nothing of it behind."""

    def run(self, listeners: list[Any]) -> RunEnded:
        """Run the job, let the `elastic.launcher.Listener`s hear its history, return the last record.

        Raises JobFailedError when there is none.
        """
        ...


class OneProcessAdapter(Adapter, Protocol):
    """An adapter with `one_process`: it runs a job's script without coordinator and agents."""

    def launcher(self, spec: JobSpec, faults: Sequence[Any]) -> JobLauncher:
        """What runs this job. Raises UsageError when it cannot make one of the faults happen."""
        ...

    def default_job(self, seed: int) -> JobSpec:
        """The job of a script that nobody launched."""
        ...
