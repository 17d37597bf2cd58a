"""A world: the slices that train together from one change of topology to the next, as the training loop sees it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from elastic.compile_watch import CompileWatch
from elastic.data import BatchMaker, Dataset
from elastic.events import WorldSpec
from elastic.ports import JobOver, Link, Runtime
from elastic.protocol import WorkerCommitted
from reshard.batches import sample_ids
from reshard.errors import ElasticError, InvariantBrokenError, MissingShardError, UsageError
from reshard.layout import Layout
from reshard.redundancy import captures
from snapshot.arena import MIN_SLOTS
from snapshot.capture import Capturer
from snapshot.contents import open_source
from snapshot.journal import JournalRecord, record_bytes
from snapshot.restore import restore
from snapshot.slot import required_bytes
from snapshot.manifest import make_static
from snapshot.source import ShardSource
from snapshot.tree import layout_of

CONFIRM_S = 60.0
"""How long an error waits for the coordinator's word whether it was a loss; the coordinator decides much sooner."""


class WorldLost(ElasticError):
    """The world was given up while the loop was in it; `with world` ends quietly."""

    kind = "world-lost"
    remedy = "Let it leave the `with world` block: the next world goes on from the snapshot."


class _Rehearsed(BaseException):
    """The rehearsal's one step is done; leaves the loop without being caught by `except Exception`."""


class StateMemory:
    """What a session remembers of the state between worlds: shapes and dtypes of its leaves, so that `init` is traced once."""

    def __init__(self) -> None:
        self.abstract: Any = None

    def remember(self, state: Any) -> None:
        """Keep the shapes and dtypes of a state (nothing of its devices)."""
        self.abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf, state
        )

    def target(self, init: Callable[..., Any], shardings: Any, arguments: tuple[Any, ...]) -> Any:
        """What to restore into: shapes and dtypes with these shardings (a prefix of the state's structure will do)."""
        if self.abstract is None:
            self.abstract = jax.eval_shape(init, *arguments)

        def place(sharding: Any, subtree: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), subtree
            )

        return jax.tree.map(place, shardings, self.abstract)


class World:
    """One world. Use as a context manager: a confirmed loss inside ends it quietly, any other error goes on up."""

    def __init__(
        self,
        spec: WorldSpec,
        link: Link,
        runtime: Runtime,
        memory: StateMemory,
        *,
        capture_every: int,
        seed: int,
    ) -> None:
        self._spec = spec
        self._memory = memory
        self._link = link
        self._runtime = runtime
        self._seed = seed
        self._capture_every = capture_every
        self._mesh: Mesh | None = None
        self._elastic_axis = "data"
        self._capturers: list[Capturer] = []
        self._layout: Layout | None = None
        self._compiles = CompileWatch.shared()
        self._restored = False
        self._left = False
        self._step = -1 if spec.restore_step is None else spec.restore_step
        self._position = spec.restore_position
        self._journalled: JournalRecord | None = None
        self._step_began_s = 0.0
        began_s = time.perf_counter()
        self._devices = tuple(runtime.form(spec))
        self._form_s = time.perf_counter() - began_s

    @property
    def generation(self) -> int:
        """The number of this world; it grows by at least one at each change of topology."""
        return self._spec.generation

    @property
    def slices(self) -> tuple[int, ...]:
        """The logical indexes of the slices that are in this world, in rank order."""
        return self._spec.slices

    @property
    def newest_step(self) -> int:
        """The newest step whose effect is in the state (-1: none)."""
        return self._step

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this world, those of a slice together, slices in rank order."""
        return self._devices

    def mesh(self, axes: Mapping[str, int]) -> Mesh:
        """The mesh of all devices of this world. One axis may have size -1: it spans what is alive, and becomes the outermost.

        Raises UsageError when the sizes do not fit the number of devices.
        """
        open_axes = [name for name, size in axes.items() if size == -1]
        fixed = int(np.prod([size for size in axes.values() if size != -1], dtype=np.int64))
        if len(open_axes) > 1 or fixed < 1 or len(self._devices) % fixed:
            raise UsageError(
                f"a mesh {dict(axes)} does not fit {len(self._devices)} devices",
                remedy="Give one axis the size -1, and let the others' product divide the devices of a slice.",
            )
        if open_axes:
            self._elastic_axis = open_axes[0]
        sizes = {name: len(self._devices) // fixed if size == -1 else size for name, size in axes.items()}
        if int(np.prod(list(sizes.values()), dtype=np.int64)) != len(self._devices):
            raise UsageError(f"a mesh {dict(axes)} does not fit {len(self._devices)} devices")
        outer_first = [*open_axes, *(name for name in sizes if name not in open_axes)]
        grid = np.array(self._devices).reshape([sizes[name] for name in outer_first])
        self._mesh = Mesh(grid.transpose([outer_first.index(name) for name in sizes]), tuple(sizes))
        return self._mesh

    # ---- state ----

    def restore(self, init: Callable[..., Any], shardings: Any, *arguments: Any) -> Any:
        """The state on this world's devices: `init(*arguments)` at first, afterwards the snapshot, resharded.

        `shardings` is a pytree of NamedShardings on `world.mesh(...)`, of the structure of the state. Makes room for the snapshots.
        Raises InsufficientMemoryError when host memory is too small for them, MissingShardError when a part of the state is nowhere.
        """
        if self._mesh is None:
            raise UsageError("world.restore before world.mesh", remedy="Call world.mesh(...) first.")
        self._check()
        began_s = time.perf_counter()
        step = self._spec.restore_step
        if step is None:
            state = jax.jit(init, out_shardings=shardings)(*arguments)
            jax.block_until_ready(state)
            read_bytes = 0
            self._memory.remember(state)
            self._prepare_capture(state)
        else:
            state, read_bytes = self._load(step, init, shardings, arguments)
            self._prepare_capture(state)
            for arena in self._link.arenas().values():
                arena.discard_newer_than(step)
            self._capture(state, step)
        self._restored = True
        self._compiles.reset()
        self._link.rebuilt(
            self.generation, step, self._form_s, time.perf_counter() - began_s, read_bytes
        )
        return state

    def _load(self, step: int, init: Callable[..., Any], shardings: Any, arguments: Any) -> tuple[Any, int]:
        source = self._source(step)
        try:
            state = restore(self._memory.target(init, shardings, arguments), source)
        finally:
            source.close()
        jax.block_until_ready(state)
        return state, sum(_local_bytes(leaf) for leaf in jax.tree.leaves(state))

    def _source(self, step: int) -> ShardSource:
        paths = [path for arena in self._link.arenas().values() for path in arena.slot_files()]
        source = open_source(paths, step, None)
        if not source.arrays:
            source.close()
            raise MissingShardError("every array", (), step)
        return source

    def _prepare_capture(self, state: Any) -> None:
        assert self._mesh is not None
        hosts = {device.id: self._runtime.host_of(device) for device in self._devices}
        layout = layout_of(state, self._mesh, hosts, elastic_axis=self._elastic_axis)
        self._layout = layout
        chosen = captures(layout, self._spec.replicas)
        self._capturers = []
        for host, arena in self._link.arenas().items():
            if host not in chosen:
                continue
            slot_bytes = required_bytes(make_static(host, layout, chosen[host]))
            self._link.reserve(host, slot_bytes, record_bytes(4096), 2 * MIN_SLOTS * self._capture_every + 8)
            capturer = Capturer(arena, layout, host, chosen[host])
            capturer.warm_up(state)
            self._capturers.append(capturer)

    def _capture(self, state: Any, step: int) -> tuple[float, int]:
        stall_s, captured_bytes = 0.0, 0
        for capturer in self._capturers:
            stats = capturer.capture(
                state, step=step, generation=self.generation, position=self._position
            )
            stall_s += stats.copy_s
            captured_bytes += stats.captured_bytes
        return stall_s, captured_bytes

    # ---- steps ----

    def batches(
        self,
        dataset: Dataset,
        *,
        global_batch: int,
        num_steps: int | None = None,
        weight_key: str | None = None,
        batch_axis: str | None = None,
    ) -> Iterator[tuple[int, dict[str, jax.Array]]]:
        """Yield `(step, batch)` from where the state stands: the same samples in the same order whatever is alive.

        `batch` is a dict of arrays `[rows, ...]`, rows split over `batch_axis` (default: the axis that spans what is alive). Which
        samples a step uses is in the journal of every host before the step is dispatched. Ends after `num_steps` in all, and at a
        step boundary when the topology is to change. Raises WorldLost when the world was given up.
        """
        if self._mesh is None or not self._restored:
            raise UsageError("world.batches before world.restore", remedy="Call world.restore(...) first.")
        maker = BatchMaker(
            self._mesh, batch_axis or self._elastic_axis, dataset, global_batch, weight_key
        )
        known = self._journalled_before()
        while num_steps is None or self._step + 1 < num_steps:
            self._check()
            if self._must_stop():
                return
            step = self._step + 1
            self._step_began_s = time.perf_counter()
            ids, _ = sample_ids(self._seed, self._position, global_batch, len(dataset))
            self._journal(step, ids, known)
            yield step, maker.make(ids)
            if self._step != step:
                raise UsageError(
                    f"step {step} was not committed", remedy="Call world.commit(step, state, metrics) in the loop."
                )

    def commit(self, step: int, state: Any, metrics: Any = None) -> None:
        """Wait until the outputs of `step` are good, and capture them.

        `metrics` may be a dict; its `"loss"` goes into the report. Raises what the step raised on the devices, and WorldLost.
        """
        if self._journalled is None or step != self._journalled.step:
            raise UsageError(f"commit of step {step}, but the batch in hand is of step {self._step + 1}")
        jax.block_until_ready((state, metrics))
        self._check()
        if self._spec.rehearsal:
            self._link.left(self.generation)
            raise _Rehearsed
        self._position = self._journalled.position
        stall_s, captured_bytes = 0.0, 0
        if (step + 1) % self._capture_every == 0:
            stall_s, captured_bytes = self._capture(state, step)
        self._step = step
        compiled = self._compiles.take()
        self._link.committed(
            WorkerCommitted(
                generation=self.generation,
                step=step,
                loss=_loss(metrics),
                step_s=time.perf_counter() - self._step_began_s,
                stall_s=stall_s,
                captured_bytes=captured_bytes,
                compile_s=compiled.compile_s,
                cache_hits=compiled.cache_hits,
                cache_misses=compiled.cache_misses,
            )
        )

    def _journal(self, step: int, ids: np.ndarray[Any, Any], known: dict[int, list[int]]) -> None:
        if step in known and known[step] != [int(sample) for sample in ids]:
            raise InvariantBrokenError(
                f"step {step} used other samples before: the data set or its order has changed", step=step
            )
        self._journalled = JournalRecord(
            step=step,
            generation=self.generation,
            position=self._position + len(ids),
            sample_ids=ids,
        )
        if not self._spec.rehearsal:
            for arena in self._link.arenas().values():
                arena.journal().append(self._journalled)

    def _journalled_before(self) -> dict[int, list[int]]:
        """The samples of the steps beyond the restored one, as the journals here have them from before."""
        known: dict[int, list[int]] = {}
        for arena in self._link.arenas().values():
            reader = arena.journal_reader()
            for record in reader.since(self._step):
                known[record.step] = [int(sample) for sample in record.sample_ids]
            reader.close()
        return known

    def _must_stop(self) -> bool:
        stop_step = self._link.stop_step(self.generation)
        if stop_step is None or self._step < stop_step:
            return False
        self._left = True
        return True

    def _check(self) -> None:
        if self._link.is_fenced(self.generation):
            raise WorldLost(f"world {self.generation} was given up")

    # ---- leaving ----

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if isinstance(error, _Rehearsed):
            return True
        if not isinstance(error, Exception) or not self._is_loss(error):
            return False
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        return True

    def _is_loss(self, error: Exception) -> bool:
        """Whether the coordinator confirms that this error comes from a loss; a user's error is told to it at once."""
        if isinstance(error, WorldLost) or self._link.is_fenced(self.generation):
            return True
        text = f"{type(error).__name__}: {error}"
        if not _may_be_loss(error):
            status = error.exit_status if isinstance(error, ElasticError) else 1
            self._link.user_failed(text[:2000], status)
            return False
        self._link.step_failed(self.generation, text[:2000])
        try:
            return self._link.wait_fenced(self.generation, CONFIRM_S)
        except JobOver:
            return False

    def finish(self) -> bool:
        """After the `with` block: leave the world. Returns whether the loop has come to its end (else another world follows)."""
        if not self._link.is_fenced(self.generation):
            if self._left:
                self._link.left(self.generation)
            elif not self._spec.rehearsal:
                self._link.ended(self.generation, self._step)
        return not self._link.wait_fenced(self.generation, None)

    def drop(self) -> None:
        """Let go of the devices and of everything on them."""
        self._devices = ()
        self._mesh = None
        self._capturers = []
        self._runtime.drop()
        self._link.unwound(self.generation)


def _may_be_loss(error: BaseException | None) -> bool:
    """Whether an error, or one it was raised from, came from the runtime rather than from Python code."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _loss(metrics: Any) -> float | None:
    value = metrics.get("loss") if isinstance(metrics, Mapping) else None
    if value is None:
        return None
    if isinstance(value, jax.Array):
        value = value.addressable_data(0)
    return float(np.asarray(value).reshape(()))


def _local_bytes(leaf: Any) -> int:
    if not isinstance(leaf, jax.Array):
        return int(np.asarray(leaf).nbytes)
    return sum(
        int(shard.data.nbytes) for shard in leaf.addressable_shards if shard.replica_id == 0
    ) or int(leaf.addressable_data(0).nbytes)
