"""Batches of a world: the same global batch and sample order whatever is alive, journalled before they
are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reshard.batches import split_batch
from reshard.errors import InvariantBrokenError, UsageError
from snapshot.arena import Arena
from snapshot.journal import JournalRecord

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


class BatchMaker:
    """Makes global batches on a mesh: rows split over `batch_axis`, whole on the other axes.

    Every process reads only the rows of its own devices. When the global batch does not divide, rows are
    padded (with real samples) and `weight_key` holds 1 for a real row and 0 for padding; a loss must be
    the weighted mean.
    """

    def __init__(
        self, mesh: Mesh, batch_axis: str, dataset: Dataset, global_batch: int, weight_key: str | None
    ) -> None:
        num_shards = int(mesh.shape[batch_axis])
        self._split = split_batch(global_batch, num_shards)
        if self._split.num_padding_rows and weight_key is None:
            raise UsageError(
                f"a global batch of {global_batch} does not divide over {num_shards} replicas",
                remedy="Give batches(weight_key=...) and weight the loss, or choose another global batch.",
            )
        self._weight_key = weight_key
        self._dataset = dataset
        self._sharding = NamedSharding(mesh, PartitionSpec(batch_axis))
        self._num_rows = num_shards * self._split.rows_per_shard
        self._order = self._split.rows().reshape(-1)
        self._weights = self._split.weights().reshape(-1)
        indices = self._sharding.addressable_devices_indices_map((self._num_rows,))
        self._local = {
            device: slice(*index[0].indices(self._num_rows)[:2])
            for device, index in indices.items()
            if index is not None
        }

    def make(self, sample_ids: np.ndarray[Any, Any]) -> dict[str, jax.Array]:
        """The global batch of these samples, a dict of arrays `[rows, ...]` on the mesh."""
        ordered = sample_ids[self._order]
        parts: dict[tuple[int, int], Rows] = {}
        for part in self._local.values():
            key = (part.start, part.stop)
            if key not in parts:
                parts[key] = read_rows(self._dataset, ordered[part])
                if self._weight_key is not None:
                    parts[key][self._weight_key] = self._weights[part]
        names = next(iter(parts.values()))
        return {name: self._global(name, parts) for name in names}

    def _global(self, name: str, parts: dict[tuple[int, int], Rows]) -> jax.Array:
        shards = [
            jax.device_put(parts[part.start, part.stop][name], device) for device, part in self._local.items()
        ]
        shape = (self._num_rows, *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, shards)


class StepJournal:
    """Writes which samples a step uses into the journal of every host here, before the step is
    dispatched.

    A step that was journalled before (it is run again after a recovery) must use the same samples.
    """

    def __init__(
        self, arenas: Iterable[Arena], generation: int, restored_step: int, *, is_kept: bool
    ) -> None:
        self._arenas = tuple(arenas) if is_kept else ()
        self._generation = generation
        self._known: dict[int, list[int]] = {}
        self.step = -1
        self.position = 0
        """The place in the sample stream after the step in hand."""
        for arena in self._arenas:
            reader = arena.journal_reader()
            for record in reader.since(restored_step):
                self._known[record.step] = [int(sample) for sample in record.sample_ids]
            reader.close()

    def write(self, step: int, ids: np.ndarray[Any, Any], position: int) -> None:
        """Journal a step. Raises InvariantBrokenError when it used other samples before."""
        samples = ids.tolist()
        if self._known.get(step, samples) != samples:
            raise InvariantBrokenError(
                f"step {step} used other samples before",
                remedy="The data set, its order or the seed has changed since; restore them.",
                step=step,
            )
        record = JournalRecord(step=step, generation=self._generation, position=position, sample_ids=samples)
        for arena in self._arenas:
            arena.journal().append(record)
        self.step, self.position = step, position
