"""How an exact global batch is shared, and which samples it holds, whatever number of slices is alive.

How many samples a step takes is in `reshard.batch_sizes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Where the rows of one step's global batch go: which micro-batch and shard, the rest being padding.

    Every shard takes `num_micro_batches` times `rows_per_shard` rows, one micro-batch after the other. Real
    rows stay in global order, shard by shard, and are shared over all micro-batches of all shards as evenly
    as they divide. Raises UsageError when a number is below 1, or the rows do not fit.
    """

    global_batch: int
    num_shards: int
    num_micro_batches: int = 1
    rows_per_shard: int
    """Rows of a shard in one micro-batch, padding included."""

    def __post_init__(self) -> None:
        if min(self.global_batch, self.num_shards, self.num_micro_batches, self.rows_per_shard) < 1:
            raise UsageError(
                f"cannot split a batch of {self.global_batch} rows over {self.num_shards} shards"
                f" in {self.num_micro_batches} micro-batches of {self.rows_per_shard} rows each",
                remedy="All four must be at least 1.",
            )
        if self.global_batch > self.num_places:
            raise UsageError(
                f"a batch of {self.global_batch} rows does not fit {self.num_shards} shards"
                f" of {self.num_micro_batches} × {self.rows_per_shard} rows"
            )

    @property
    def num_places(self) -> int:
        """Rows over all micro-batches and shards, padding included."""
        return self.num_micro_batches * self.num_shards * self.rows_per_shard

    @property
    def num_padding_rows(self) -> int:
        """Padding rows over all micro-batches and shards."""
        return self.num_places - self.global_batch

    def holding(self, global_batch: int) -> BatchPlan:
        """The same shape for another number of rows. Raises UsageError when it is too small for them."""
        return replace(self, global_batch=global_batch)

    def rows(self) -> NDArray[np.int64]:
        """Return the global row at each place, shape `[num_micro_batches, num_shards, rows_per_shard]`.

        A padding place repeats the last real row before it in its micro-batch and shard (row 0 if there is
        none), so that it holds valid data; `weights` is zero there.
        """
        starts, stops = self._bounds()
        last = np.where(stops > starts, stops - 1, 0)
        rows: NDArray[np.int64] = np.minimum(starts + np.arange(self.rows_per_shard), last)
        return rows

    def weights(self) -> NDArray[np.float32]:
        """Return 1 at each real row and 0 at padding, of the shape of `rows`.

        They sum to `global_batch`; so `sum(weights * loss) / global_batch`, added up over all micro-batches
        and shards, is the mean over exactly the global batch.
        """
        starts, stops = self._bounds()
        return (starts + np.arange(self.rows_per_shard) < stops).astype(np.float32)

    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First real row and the one after the last, each of shape `[num_micro_batches, num_shards, 1]`."""
        num_parts = self.num_shards * self.num_micro_batches
        rows, longer = divmod(self.global_batch, num_parts)
        part = np.arange(num_parts + 1, dtype=np.int64)
        edges = part * rows + np.minimum(part, longer)
        # The parts of a shard lie together, so that a host reads one stretch of the batch.
        by_shard = self.num_shards, self.num_micro_batches
        starts, stops = (ends.reshape(by_shard).T[:, :, None] for ends in (edges[:-1], edges[1:]))
        return starts, stops


def plan_batch(global_batch: int, num_shards: int, max_rows_per_shard: int | None = None) -> BatchPlan:
    """Return the plan with the fewest micro-batches of at most `max_rows_per_shard` rows on each shard.

    Without a bound there is one micro-batch. Rows are as few as suffice: a micro-batch has at most one
    padding row on a shard. Raises UsageError for a number below 1.
    """
    if min(global_batch, num_shards) < 1 or (max_rows_per_shard is not None and max_rows_per_shard < 1):
        most = "" if max_rows_per_shard is None else f" with at most {max_rows_per_shard} rows on each"
        raise UsageError(f"cannot split a batch of {global_batch} rows over {num_shards} shards{most}")
    rows = -(-global_batch // num_shards)
    num_micro_batches = 1 if max_rows_per_shard is None else -(-rows // max_rows_per_shard)
    return BatchPlan(
        global_batch=global_batch,
        num_shards=num_shards,
        num_micro_batches=num_micro_batches,
        rows_per_shard=-(-rows // num_micro_batches),
    )


def sample_ids(
    seed: int, position: int, count: int, dataset_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples at stream positions `position` to `position + count`, and the epoch of each.

    The stream is one permutation of `range(dataset_size)` an epoch, made from (seed, epoch) alone: it does
    not know slices, hosts or how it is cut into batches. Position p is in epoch `p // dataset_size`. Both
    results have shape `[count]`. Raises `UsageError` for a negative argument or an empty data set.
    """
    if min(seed, position, count) < 0 or dataset_size < 1:
        raise UsageError(
            f"no samples at position {position}, count {count}, of {dataset_size} with seed {seed}",
            remedy="Seed, position and count must not be negative, and the data set not empty.",
        )
    positions = np.arange(position, position + count, dtype=np.int64)
    epochs, offsets = np.divmod(positions, dataset_size)
    ids = np.empty(count, dtype=np.int64)
    for epoch in range(position // dataset_size, -(-(position + count) // dataset_size)):
        start = max(position, epoch * dataset_size) - position
        stop = min(position + count, (epoch + 1) * dataset_size) - position
        ids[start:stop] = _permutation(seed, epoch, dataset_size)[offsets[start:stop]]
    return ids, epochs


@lru_cache(maxsize=2)  # a batch straddles two epochs at most, unless the data set is smaller than it
def _permutation(seed: int, epoch: int, dataset_size: int) -> NDArray[np.int64]:
    # Raw Philox words ranked by a stable sort: numpy promises the raw stream for ever, but not the
    # algorithm of `Generator.permutation`, and a resumed run must see the same order under a newer numpy.
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(dataset_size)
    order = np.argsort(np.asarray(words, dtype=np.uint64), kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order
