"""The rows of a global batch, read from a data set and put on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reshard.batches import plan_batch
from reshard.errors import UsageError

Rows = dict[str, np.ndarray[Any, Any]]


class Dataset(Protocol):
    """A map-style data set: `len(dataset)` samples, each a dict of arrays. `rows(ids)`, if there, reads
    many at once.
    """

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def __getitem__(self, index: int) -> Any:
        """One sample: a dict of numpy arrays or numbers."""
        ...


def read_rows(dataset: Dataset, ids: Sequence[int] | np.ndarray[Any, Any]) -> Rows:
    """Samples stacked along a new first dim: a dict of arrays `[len(ids), ...]`."""
    many = getattr(dataset, "rows", None)
    if many is not None:
        rows: Rows = many(np.asarray(ids))
        return rows
    samples = [dataset[int(index)] for index in ids]
    if not isinstance(samples[0], dict):
        raise UsageError(f"a sample must be a dict of arrays, not {type(samples[0]).__name__}")
    return {key: np.stack([np.asarray(sample[key]) for sample in samples]) for key in samples[0]}


@dataclass(frozen=True, slots=True)
class _Places:
    """Which sample of the batch is at each place, and its weight, as in `reshard.batches.BatchPlan`."""

    rows: np.ndarray[Any, np.dtype[np.int64]]
    weights: np.ndarray[Any, np.dtype[np.float32]]


class BatchMaker:
    """Makes global batches on a mesh: rows split over `batch_axis`, whole on the other axes.

    Every process reads only the rows of its own devices. With `max_rows_per_device` arrays are
    `[micro-batches, rows, ...]`, else `[rows, ...]`. When the global batch does not divide, rows are padded
    (with real samples) and `weight_key` holds 1 for a real row and 0 for padding; a loss must be the weighted
    mean. Raises UsageError when rows would have to be padded and there is no `weight_key`.
    """

    def __init__(
        self,
        mesh: Mesh,
        batch_axis: str,
        dataset: Dataset,
        global_batch: int,
        weight_key: str | None,
        max_rows_per_device: int | None = None,
    ) -> None:
        num_shards = int(mesh.shape[batch_axis])
        self._usual = plan_batch(global_batch, num_shards, max_rows_per_device)
        self._weight_key = weight_key
        self._dataset = dataset
        self._max_rows = max_rows_per_device
        spec = PartitionSpec(batch_axis) if max_rows_per_device is None else PartitionSpec(None, batch_axis)
        self._sharding = NamedSharding(mesh, spec)
        one_row = (num_shards,) if max_rows_per_device is None else (1, num_shards)
        indices = self._sharding.addressable_devices_indices_map(one_row)
        self._shard_of = {
            device: index[-1].start or 0 for device, index in indices.items() if index is not None
        }
        self._places: dict[int, _Places] = {}
        self._places_for(global_batch)

    def make(self, sample_ids: np.ndarray[Any, Any]) -> dict[str, jax.Array]:
        """The global batch of these samples, a dict of arrays on the mesh.

        Fewer samples than usual come in arrays of the usual shape, so that nothing is compiled for them.
        """
        places = self._places_for(len(sample_ids))
        parts: dict[int, Rows] = {}
        for shard in self._shard_of.values():
            if shard not in parts:
                parts[shard] = self._read(sample_ids, places, shard)
        names = next(iter(parts.values()))
        return {name: self._global(name, parts) for name in names}

    def _places_for(self, count: int) -> _Places:
        if count not in self._places:
            usual = self._usual
            fits = count <= usual.num_places
            plan = usual.holding(count) if fits else plan_batch(count, usual.num_shards, self._max_rows)
            if plan.num_padding_rows and self._weight_key is None:
                parts = f" × {plan.num_micro_batches} micro-batches" * (plan.num_micro_batches > 1)
                raise UsageError(
                    f"a global batch of {count} does not divide over {plan.num_shards} replicas{parts}",
                    remedy="Give batches(weight_key=...) and weight the loss, or another global batch.",
                )
            self._places[count] = _Places(plan.rows(), plan.weights())
        return self._places[count]

    def _read(self, sample_ids: np.ndarray[Any, Any], places: _Places, shard: int) -> Rows:
        """One shard's rows of all micro-batches, in the shape that its devices hold."""
        chosen = places.rows[:, shard]
        rows = dict(read_rows(self._dataset, sample_ids[chosen.reshape(-1)]))
        if self._weight_key is not None:
            if self._weight_key in rows:
                raise UsageError(
                    f"the samples have an array {self._weight_key!r} already, which weight_key would replace",
                    remedy="Give world.batches another weight_key.",
                )
            rows[self._weight_key] = places.weights[:, shard].reshape(-1)
        if self._max_rows is None:
            return rows
        return {name: part.reshape(*chosen.shape, *part.shape[1:]) for name, part in rows.items()}

    def _global(self, name: str, parts: dict[int, Rows]) -> jax.Array:
        shards = [jax.device_put(parts[shard][name], device) for device, shard in self._shard_of.items()]
        rows_dim = 0 if self._max_rows is None else 1
        shape = list(shards[0].shape)
        shape[rows_dim] *= self._usual.num_shards
        return jax.make_array_from_single_device_arrays(tuple(shape), self._sharding, shards)
