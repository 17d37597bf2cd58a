"""The state between a world's devices and the hosts' snapshot memory: made fresh, restored, captured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from elastic.audit_schedule import AuditSchedule
from elastic.events import WorldSpec
from elastic.ports import Link, Runtime
from reshard.copies import pack_checksums
from reshard.errors import MissingShardError
from reshard.redundancy import captures
from snapshot.arena import MIN_SLOTS
from snapshot.audit import Auditor
from snapshot.capture import Capturer
from snapshot.contents import open_source
from snapshot.describe import describe_tree
from snapshot.journal import record_bytes
from snapshot.restore import restore
from snapshot.source import ShardSource
from snapshot.tree import layout_of

MAX_JOURNALLED_SAMPLES = 4096
MIN_JOURNAL_RECORDS = 64
"""So many steps an agent may fall behind its worker and still find what they used."""


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
        capture_every: int,
    ) -> None:
        self._spec = spec
        self._link = link
        self._memory = memory
        self._mesh = mesh
        self._elastic_axis = elastic_axis
        self._capture_every = capture_every
        self._capturers: list[Capturer] = []
        self._auditor: Auditor | None = None
        newest_step = -1 if spec.restore_step is None else spec.restore_step
        self._audits = AuditSchedule(spec.audit_every * capture_every, newest_step)

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
        source = self._source(step)
        try:
            state = restore(self._memory.target(init, shardings, arguments), source)
        finally:
            source.close()
        jax.block_until_ready(state)
        self._prepare(state, runtime)
        for arena in self._link.arenas().values():
            arena.discard_newer_than(step)
        self.capture(state, step, self._spec.restore_position)
        return state, sum(map(_local_bytes, jax.tree.leaves(state)))

    def capture(self, state: Any, step: int, position: int) -> tuple[float, int]:
        """Copy this process's share into the snapshots; returns how long the loop was held (seconds) and
        the bytes. The checksums are told, to be compared with those of other slices.
        """
        stall_s, captured_bytes = 0.0, 0
        generation = self._spec.generation
        for capturer in self._capturers:
            stats = capturer.capture(state, step=step, generation=generation, position=position)
            stall_s += stats.copy_s
            captured_bytes += stats.captured_bytes
            checksums = pack_checksums(stats.checksums)
            self._link.captured(capturer.static.host, generation, step, checksums, is_audit=False)
        if self._audits.take_due(step, self._link.audit_step(generation)):
            stall_s += self._audit(state, step)
        return stall_s, captured_bytes

    def _audit(self, state: Any, step: int) -> float:
        """Tell the checksums of all that the devices hold; returns how long the loop was held (seconds)."""
        if self._auditor is None:
            return 0.0
        began_s = time.perf_counter()
        for host, checksums in self._auditor.checksums(state).items():
            self._link.captured(host, self._spec.generation, step, checksums, is_audit=True)
        return time.perf_counter() - began_s

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether the state after `step` is to be captured: each k-th, and the first and last of the run."""
        return step == 0 or is_last or (step + 1) % self._capture_every == 0

    def reserve_journal(self, num_samples: int) -> None:
        """Make room for steps of so many samples, where that is more than usual."""
        if num_samples > MAX_JOURNALLED_SAMPLES:
            for capturer in self._capturers:
                self._reserve(capturer, num_samples)

    def _source(self, step: int) -> ShardSource:
        paths = [path for arena in self._link.arenas().values() for path in arena.slot_files()]
        # The chosen snapshot, and what the agents fetched of it for this world; no other timeline's.
        generations = (self._spec.restore_generation or 0, self._spec.generation)
        captured_in = self._spec.restore_generation or 0
        left_out = frozenset((captured_in, *copy) for copy in self._spec.left_out)
        source = open_source(paths, step, generations, left_out)
        if not source.arrays:
            source.close()
            raise MissingShardError("every array", (), step)
        return source

    def _prepare(self, state: Any, runtime: Runtime) -> None:
        """Make room in the arenas and work out what goes where, so that captures only copy."""
        hosts = {device.id: runtime.host_of(device) for device in self._mesh.devices.flat}
        layout = layout_of(state, self._mesh, hosts, elastic_axis=self._elastic_axis)
        if self._spec.rank == 0 and not self._spec.rehearsal:
            self._link.laid_out(self._spec.generation, layout)
        if self._spec.persists and not self._spec.rehearsal:
            self._link.described(describe_tree(state))
        self._auditor = Auditor(
            layout, [device.id for device in self._mesh.devices.flat], self._link.arenas()
        )
        chosen = captures(layout, self._spec.replicas)
        for host, arena in self._link.arenas().items():
            if host not in chosen:
                continue
            capturer = Capturer(arena, layout, host, chosen[host])
            self._reserve(capturer, MAX_JOURNALLED_SAMPLES)
            capturer.warm_up(state)
            self._capturers.append(capturer)

    def _reserve(self, capturer: Capturer, num_samples: int) -> None:
        num_records = 2 * MIN_SLOTS * self._capture_every + MIN_JOURNAL_RECORDS
        size = record_bytes(num_samples)
        self._link.reserve(capturer.static.host, capturer.slot_bytes, size, num_records)


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def _local_bytes(leaf: Any) -> int:
    """Bytes of the distinct boxes that this process holds of an array."""
    if not isinstance(leaf, jax.Array):
        return 0
    boxes = {str(shard.index): int(shard.data.nbytes) for shard in leaf.addressable_shards}
    return sum(boxes.values())
