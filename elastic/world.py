"""A world: the slices that train together from one change of topology to the next, as the training loop
sees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic.cadence import Cadence
from elastic.compile_watch import CompileWatch
from elastic.data import BatchMaker, Dataset
from elastic.device_pace import DevicePace
from elastic.device_probe import own_devices
from elastic.events import WorldSpec
from elastic.feed import Feed
from elastic.meshes import fitted_sharding, map_specs, mesh_of
from elastic.ports import Link, Runtime, WorldLost
from elastic.protocol import WorkerCommitted
from elastic.state_keeper import StateKeeper, StateMemory
from elastic.step_errors import clear_frames
from elastic.step_verdict import is_loss
from reshard.batch_sizes import BatchSize, LrRule, choose_batch_size
from reshard.errors import UsageError


class _Rehearsed(BaseException):
    """The rehearsal's one step is done; leaves the loop without being caught by `except Exception`."""


class World:
    """One world. Use as a context manager: a confirmed loss inside ends it quietly, any other error goes on
    up.
    """

    def __init__(
        self,
        spec: WorldSpec,
        link: Link,
        runtime: Runtime,
        memory: StateMemory,
        *,
        cadence: Cadence,
        copy_threads: int | None,
        seed: int,
        full_slices: int,
    ) -> None:
        self._spec = spec
        self._link = link
        self._runtime = runtime
        self._memory = memory
        self._cadence = cadence
        self._copy_threads = copy_threads
        self._seed = seed
        self._full_slices = full_slices
        self._compiles = CompileWatch.shared()
        self._mesh: Mesh | None = None
        self._elastic_axis = "data"
        self._keeper: StateKeeper | None = None
        self._feed: Feed | None = None
        self._left = False
        self._step = -1 if spec.restore_step is None else spec.restore_step
        self._position = spec.restore_position
        self._num_steps: int | None = None
        self._step_began_s = 0.0
        self._committed_s: float | None = None
        self._input_s = 0.0
        self._loop_cpu_s = 0.0
        """The main thread's processor time when the batch in hand was handed out."""
        self._device_s: float | None = None
        began_s = time.perf_counter()
        self._devices = tuple(runtime.form(spec))
        self._form_s = time.perf_counter() - began_s
        # A process of one slice tells how fast that is; one that plays all of them has nothing to compare.
        is_own = not spec.rehearsal and len(link.arenas()) == 1
        self._pace = DevicePace(own_devices(self._devices) if is_own else ())

    @property
    def generation(self) -> int:
        """The number of this world; it grows by at least one at each change of topology."""
        return self._spec.generation

    @property
    def slices(self) -> tuple[int, ...]:
        """The logical indexes of the slices that are in this world, in rank order."""
        return self._spec.seats or self._spec.slices

    @property
    def newest_step(self) -> int:
        """The newest step whose effect is in the state (-1: none)."""
        return self._step

    @property
    def lr_scale(self) -> float:
        """What to multiply the learning rate by at the step in hand; 1 unless `batches(slice_batch=...)`.

        Pass it to the jitted step as an argument: it may differ from step to step.
        """
        return 1.0 if self._feed is None else self._feed.lr_scale

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this world, those of a slice together, slices in rank order."""
        return self._devices

    def mesh(self, axes: Mapping[str, int]) -> Mesh:
        """The mesh of all devices of this world.

        One axis may have size -1: it spans what is alive, and becomes the outermost, so that the others stay
        within a slice. Raises UsageError when the sizes do not fit the number of devices.
        """
        try:
            self._mesh, open_axis = mesh_of(self._devices, axes)
        except UsageError:
            if not self._spec.rehearsal:
                raise
            # There will be no world of so many slices: some would be idle. Nothing to compile for it.
            self._link.rebuilt(self.generation, None, self._form_s, 0.0, 0)
            self._end_rehearsal()
        if open_axis is not None:
            self._elastic_axis = open_axis
        return self._mesh

    def sharding(
        self, shape: Sequence[int], spec: PartitionSpec, *, memory_kind: str | None = None
    ) -> NamedSharding:
        """The sharding of an array of `shape` on this world's mesh, partitioned as `spec` says.

        A dim that does not divide over the axis that spans what is alive is replicated over it: an array of
        4,096 rows is in parts on 4 slices and on 2, and whole on each of 3. The engine plans recoveries by
        the same rule. Raises UsageError before `world.mesh`, and when another axis is what does not divide.
        """
        if self._mesh is None:
            raise UsageError("world.sharding before world.mesh", remedy="Call world.mesh(...) first.")
        return fitted_sharding(self._mesh, self._elastic_axis, shape, spec, memory_kind=memory_kind)

    def shardings(self, specs: Any, shapes: Any) -> Any:
        """The shardings of a whole state, by the rule of `sharding`: what `restore` takes.

        `shapes` is a pytree of what has a shape, such as `jax.eval_shape(init)`; `specs` a pytree of
        PartitionSpecs of its structure or a prefix of it, or a function that gives the spec of a leaf.
        """
        return map_specs(self.sharding, specs, shapes)

    def restore(self, init: Callable[..., Any], shardings: Any, *arguments: Any) -> Any:
        """The state on this world's devices: `init(*arguments)` at first, afterwards the snapshot, resharded.

        `shardings` is a pytree of NamedShardings on `world.mesh(...)`, of the structure of the state or a
        prefix of it. Makes room for the snapshots. Raises InsufficientMemoryError when host memory is too
        small for them, MissingShardError when a part of the state is nowhere, WorldLost.
        """
        if self._mesh is None:
            raise UsageError("world.restore before world.mesh", remedy="Call world.mesh(...) first.")
        self._check()
        began_s = time.perf_counter()
        keeper = StateKeeper(
            self._spec,
            self._link,
            self._memory,
            self._mesh,
            self._elastic_axis,
            self._cadence,
            copy_threads=self._copy_threads,
        )
        state, read_bytes = keeper.make(init, shardings, arguments, self._runtime)
        self._keeper = keeper
        self._compiles.reset()
        restore_s = time.perf_counter() - began_s
        self._link.rebuilt(self.generation, self._spec.restore_step, self._form_s, restore_s, read_bytes)
        return state

    def batches(
        self,
        dataset: Dataset,
        *,
        global_batch: int | None = None,
        slice_batch: int | None = None,
        lr_rule: LrRule | None = None,
        max_rows_per_device: int | None = None,
        num_steps: int | None = None,
        weight_key: str | None = None,
        batch_axis: str | None = None,
    ) -> Iterator[tuple[int, dict[str, jax.Array]]]:
        """Yield `(step, batch)` from where the state stands: the samples in the same order whatever is alive.

        A step takes `global_batch` samples, or `slice_batch` for each slice alive; then `lr_scale` follows
        `lr_rule` ("linear", "sqrt" or "none"), and a step that was committed before a loss is run again with
        as many samples as it had then. `batch` is a dict of arrays `[rows, ...]`, rows split over
        `batch_axis` (default: the axis that spans what is alive); with `max_rows_per_device`
        `[micro-batches, rows, ...]`, of as few micro-batches as keep that bound. Where rows do not divide,
        `weight_key` names the array that has 1 for a real row and 0 for padding: the loss must be the mean
        weighted by it (`elastic.mean_value_and_grad`).

        Which samples a step uses is in every host's journal before the step is dispatched. Ends after
        `num_steps` steps of the run, and at a step boundary when the topology is to change. Raises WorldLost
        when the world was given up, UsageError for arguments that do not fit.
        """
        size = choose_batch_size(
            global_batch=global_batch,
            slice_batch=slice_batch,
            lr_rule=lr_rule,
            full_slices=self._full_slices,
            is_weighted=weight_key is not None,
        )
        self._num_steps = num_steps
        feed = self._open_feed(dataset, size, weight_key, max_rows_per_device, batch_axis)
        while num_steps is None or self._step + 1 < num_steps:
            self._check()
            if self._must_stop():
                return
            step = self._step + 1
            self._step_began_s = time.perf_counter()
            batch = feed.take(step)
            self._input_s, self._loop_cpu_s = time.perf_counter() - self._step_began_s, time.thread_time()
            yield step, batch
            if self._step != step:
                raise UsageError(
                    f"step {step} was not committed",
                    remedy="Call world.commit(step, state, metrics) for every batch.",
                )

    def commit(self, step: int, state: Any, metrics: Any = None) -> None:
        """Wait until the outputs of `step` are good, and capture them.

        `metrics` may be a dict; its `"loss"` goes into the report. Raises what the step raised on the
        devices, WorldLost when the world was given up, UsageError for another step than that of the batch in
        hand.
        """
        if step == self._step and self._feed is not None:
            raise UsageError(f"step {step} was committed twice", remedy="Commit once for every batch.")
        if self._feed is None or self._keeper is None or step != self._feed.step:
            raise UsageError(f"commit of step {step}, but the batch in hand is of step {self._step + 1}")
        host_s = self._input_s + time.thread_time() - self._loop_cpu_s
        jax.block_until_ready((state, metrics))
        ready_s = time.perf_counter()
        self._check()
        if self._spec.rehearsal:
            self._keeper.settle()
            self._end_rehearsal()
        self._position = self._feed.position
        began_s = self._step_began_s if self._committed_s is None else self._committed_s
        paced = self._keeper.after_step(
            state,
            step,
            self._position,
            num_steps=self._num_steps,
            work_s=ready_s - began_s,
            compile_s=self._compiles.compile_s,
        )
        self._step = step
        compiled = self._compiles.take()
        self._link.committed(
            WorkerCommitted(
                generation=self.generation,
                step=step,
                loss=_loss(metrics),
                step_s=time.perf_counter() - self._step_began_s,
                stall_s=paced.stall_s,
                captured_bytes=paced.captured_bytes,
                skipped=paced.skipped,
                interval_steps=paced.interval_steps,
                compile_s=compiled.compile_s,
                cache_hits=compiled.cache_hits,
                cache_misses=compiled.cache_misses,
                host_s=host_s,
                device_s=self._device_s,
            )
        )
        self._device_s = self._pace.measure_if_due()
        self._compiles.reset()
        self._committed_s = time.perf_counter()

    def _open_feed(
        self,
        dataset: Dataset,
        size: BatchSize,
        weight_key: str | None,
        max_rows_per_device: int | None,
        batch_axis: str | None,
    ) -> Feed:
        if self._mesh is None or self._keeper is None:
            raise UsageError("world.batches before world.restore", remedy="Call world.restore(...) first.")
        self._keeper.reserve_journal(size.global_batch(self._full_slices))
        axis = batch_axis or self._elastic_axis
        usual = size.global_batch(len(self.slices))
        maker = BatchMaker(self._mesh, axis, dataset, usual, weight_key, max_rows_per_device)
        arenas = self._link.arenas().values()
        self._feed = Feed(self._spec, size, maker, dataset, self._seed, arenas, self._position)
        return self._feed

    def _end_rehearsal(self) -> NoReturn:
        self._link.left(self.generation)
        raise _Rehearsed

    def _must_stop(self) -> bool:
        stop_step = self._link.stop_step(self.generation)
        self._left = stop_step is not None and self._step >= stop_step
        return self._left

    def _check(self) -> None:
        if self._link.is_fenced(self.generation):
            raise WorldLost(f"world {self.generation} was given up")

    # ---- leaving ----

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, _Rehearsed):
            return True
        if error is None and self._keeper is not None:
            try:
                self._keeper.finish()
            except (jax.errors.JaxRuntimeError, ValueError) as failed:
                if not self._is_loss(failed):
                    raise
                return True
        if self._spec.solo and isinstance(error, Exception | SystemExit):
            if not isinstance(error, WorldLost):  # the process is wanted elsewhere
                self._link.user_failed(f"{type(error).__name__}: {error}"[:500], 1)
        elif not isinstance(error, Exception) or not self._is_loss(error):
            return False
        clear_frames(error)
        return True

    def _is_loss(self, error: Exception) -> bool:
        return is_loss(error, self._link, self.generation, self._devices)

    def finish(self) -> bool:
        """For the session, after the `with` block: wait for what comes next; True when the loop has come to
        its end.
        """
        if not self._link.is_fenced(self.generation):
            if self._left:
                self._link.left(self.generation)
            elif not self._spec.rehearsal:
                self._link.ended(self.generation, self._step)
        return not self._link.wait_fenced(self.generation, None)

    def drop(self) -> None:
        """For the session: let go of the devices and of everything on them."""
        self._devices = ()
        self._pace = DevicePace(())
        self._mesh = None
        self._keeper = None
        self._runtime.drop()
        self._link.unwound(self.generation)


def _loss(metrics: Any) -> float | None:
    value = metrics.get("loss") if isinstance(metrics, Mapping) else None
    if value is None:
        return None
    if isinstance(value, jax.Array):
        value = value.addressable_data(0)
    return float(np.asarray(value).reshape(()))
