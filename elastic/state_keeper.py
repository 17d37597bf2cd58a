"""The state between a world's devices and the hosts' snapshot memory: made fresh, restored, captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from elastic.cadence import Cadence, longest_interval
from elastic.copy_reports import CopyReports
from elastic.events import WorldSpec
from elastic.expected import first_lacking
from elastic.paced_capture import Paced, PacedCapture
from elastic.ports import Link, Room, Runtime, WorldLost
from reshard.boxes import format_box
from reshard.errors import MissingShardError, UsageError
from reshard.ids import HostId
from reshard.redundancy import host_buddies, host_captures, needs_buddies
from snapshot.audit import Auditor
from snapshot.capture import Capturer
from snapshot.capture_slots import MIN_SLOTS
from snapshot.contents import open_source
from snapshot.describe import describe_tree
from snapshot.journal import record_bytes
from snapshot.manifest import make_static
from snapshot.restore import check_complete, restore
from snapshot.slot import required_bytes
from snapshot.source import ShardSource
from snapshot.tree import layout_of

REPLAN_S = 60.0
"""How long a worker that lacks boxes waits for the word that its world is planned anew; it comes at once."""
MAX_JOURNALLED_SAMPLES = 4096
MIN_JOURNAL_RECORDS = 64
"""So many steps an agent may fall behind its worker and still find what they used."""
SMALL_JOURNAL_RECORDS = 128
"""A journal of no more is made before the size of a batch is known."""
MAX_JOURNAL_BYTES = 32 << 20
"""What steps that run again used before is checked as far back as this reaches."""


class StateMemory:
    """What a session keeps of the state between worlds: its leaves' shapes and dtypes, so that `init` is
    traced once.
    """

    def __init__(self) -> None:
        self._abstract: Any = None

    def remember(self, state: Any) -> None:
        """Keep the shapes and dtypes of a state (nothing of its devices)."""
        self._abstract = jax.tree.map(_abstract, state)

    def target(self, init: Callable[..., Any], shardings: Any, arguments: tuple[Any, ...]) -> Any:
        """What to restore into: shapes and dtypes with these shardings (a prefix of the state's structure
        will do).
        """
        if self._abstract is None:
            self._abstract = jax.eval_shape(init, *arguments)

        def place(sharding: Any, subtree: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), subtree
            )

        return jax.tree.map(place, shardings, self._abstract)


class StateKeeper:
    """Makes, restores and captures the state of one world on `mesh`, whose axis `elastic_axis` spans what
    is alive.
    """

    def __init__(
        self,
        spec: WorldSpec,
        link: Link,
        memory: StateMemory,
        mesh: Mesh,
        elastic_axis: str,
        cadence: Cadence,
        *,
        copy_threads: int | None,
    ) -> None:
        self._spec = spec
        self._link = link
        self._memory = memory
        self._mesh = mesh
        self._elastic_axis = elastic_axis
        self._cadence = cadence
        self._copy_threads = copy_threads
        self._capturers: list[Capturer] = []
        self._buddy_bytes: dict[HostId, int] = {}
        self._has_buddies = False
        self._captures: PacedCapture | None = None
        self._num_records = 2 * MIN_SLOTS * longest_interval(cadence) + MIN_JOURNAL_RECORDS

    def make(
        self, init: Callable[..., Any], shardings: Any, arguments: tuple[Any, ...], runtime: Runtime
    ) -> tuple[Any, int]:
        """The state on the devices, ready to be captured, and the bytes read for it (0 for a fresh one)."""
        step = self._spec.restore_step
        if step is None:
            state = jax.jit(init, out_shardings=shardings)(*arguments)
            jax.block_until_ready(state)
            self._memory.remember(state)
            self._prepare(state, runtime)
            return state, 0
        target = self._memory.target(init, shardings, arguments)
        source = self._source(step)
        try:
            check_complete(target, source)
            self._check_planned(target, source, runtime)
            state = restore(
                target, source, num_threads=self._copy_threads, count_writes=self._spec.count_writes
            )
        finally:
            source.close()
        jax.block_until_ready(state)
        self._prepare(state, runtime)
        for arena in self._link.arenas().values():
            arena.discard_newer_than(step)
        self._paced().capture(state, step, self._spec.restore_position)
        return state, sum(map(_local_bytes, jax.tree.leaves(state)))

    def after_step(
        self,
        state: Any,
        step: int,
        position: int,
        *,
        num_steps: int | None,
        work_s: float,
        compile_s: float,
    ) -> Paced:
        """Copy this process's share of the state after `step` into the snapshots, if it is its turn.

        See `PacedCapture.after_step`. A world that is left after the step is left with a snapshot of it.
        """
        stop_step = self._link.stop_step(self._spec.generation)
        return self._paced().after_step(
            state,
            step,
            position,
            num_steps=num_steps,
            is_leaving=stop_step is not None and step >= stop_step,
            work_s=work_s,
            compile_s=compile_s,
        )

    def settle(self) -> None:
        """See `PacedCapture.settle`."""
        self._paced().settle()

    def finish(self) -> None:
        """See `PacedCapture.finish`."""
        self._paced().finish()

    def reserve_journal(self, num_samples: int) -> None:
        """Make room for steps of so many samples, where that was not done yet."""
        if num_samples > MAX_JOURNALLED_SAMPLES or self._num_records > SMALL_JOURNAL_RECORDS:
            size = record_bytes(num_samples)
            most = max(MAX_JOURNAL_BYTES // size, MIN_JOURNAL_RECORDS)
            for capturer in self._capturers:
                self._reserve(capturer, size, min(self._num_records, most))

    def _paced(self) -> PacedCapture:
        if self._captures is None:
            raise UsageError("nothing can be captured before the state was made")
        return self._captures

    def _source(self, step: int) -> ShardSource:
        paths = [path for arena in self._link.arenas().values() for path in arena.slot_files()]
        # The chosen snapshot, and what the agents fetched of it for this world; no other lineage's.
        generations = (self._spec.restore_generation or 0, self._spec.generation)
        captured_in = self._spec.restore_generation or 0
        left_out = frozenset((captured_in, *copy) for copy in self._spec.left_out)
        source = open_source(paths, step, generations, left_out)
        if not source.arrays:
            source.close()
            raise MissingShardError("every array", (), step)
        return source

    def _check_planned(self, target: Any, source: ShardSource, runtime: Runtime) -> None:
        """Have the world formed anew where the script asks for boxes that were not planned for, and so are
        not here. Raises WorldLost then.
        """
        layout = layout_of(target, self._mesh, self._hosts(runtime), elastic_axis=self._elastic_axis)
        lacking = first_lacking(layout, self._link.arenas(), source)
        if lacking is None:
            return
        path, box = lacking
        self._link.laid_out(self._spec.generation, layout, f"{format_box(box)} of {path}")
        if self._link.wait_fenced(self._spec.generation, REPLAN_S):
            raise WorldLost(f"world {self._spec.generation} was planned for another layout")
        raise MissingShardError(path, box, source.step)

    def _hosts(self, runtime: Runtime) -> dict[int, HostId]:
        """The host of each device, by the device's id."""
        return {device.id: runtime.host_of(device) for device in self._mesh.devices.flat}

    def _prepare(self, state: Any, runtime: Runtime) -> None:
        """Make room in the arenas and work out what goes where, so that captures only copy."""
        hosts = self._hosts(runtime)
        layout = layout_of(state, self._mesh, hosts, elastic_axis=self._elastic_axis)
        if self._spec.rank == 0:
            self._link.laid_out(self._spec.generation, layout)
        if self._spec.persists and not self._spec.rehearsal:
            self._link.described(describe_tree(state))
        devices = [device.id for device in self._mesh.devices.flat]
        auditor = Auditor(layout, devices, self._link.arenas())
        replicas = self._spec.replicas
        self._has_buddies = needs_buddies(layout, replicas)
        in_mesh = set(layout.mesh.distinct_hosts())
        for host, arena in self._link.arenas().items():
            if host not in in_mesh:
                continue
            chosen = host_captures(layout, host, replicas)
            own = [device_id for device_id, owner in hosts.items() if owner == host]
            capturer = Capturer(arena, layout, host, chosen, device_ids=own, num_threads=self._copy_threads)
            shards = [(copy.path, copy.box) for copy in host_buddies(layout, host, replicas)]
            self._buddy_bytes[host] = required_bytes(make_static(host, layout, shards)) if shards else 0
            is_small = self._num_records <= SMALL_JOURNAL_RECORDS
            self._reserve(
                capturer, record_bytes(MAX_JOURNALLED_SAMPLES), self._num_records if is_small else 0
            )
            capturer.warm_up(state)
            self._capturers.append(capturer)
        self._captures = PacedCapture(
            self._cadence,
            self._capturers,
            tuple(self._mesh.devices.flat),
            self._link,
            self._spec.generation,
            CopyReports(self._link, self._spec.generation, auditor, self._spec.audit_every),
            restored_step=self._spec.restore_step,
        )

    def _reserve(self, capturer: Capturer, journal_record_bytes: int, num_records: int) -> None:
        host = capturer.static.host
        self._link.reserve(
            host,
            Room(
                slot_bytes=capturer.slot_bytes,
                journal_record_bytes=journal_record_bytes,
                journal_records=num_records,
                buddy_bytes=self._buddy_bytes[host] if self._has_buddies else None,
            ),
        )


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def _local_bytes(leaf: Any) -> int:
    """Bytes of the distinct boxes that this process holds of an array."""
    if not isinstance(leaf, jax.Array):
        return 0
    boxes = {str(shard.index): int(shard.data.nbytes) for shard in leaf.addressable_shards}
    return sum(boxes.values())
