"""How an exact global batch is shared, and which samples it holds, whatever number of slices is alive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """A global batch on `num_shards` equally large shards, the difference filled with weightless rows.

    Real rows are shared as evenly as they divide and stay in global order: shard `i` begins where shard
    `i - 1` ended. A shard is padded to `rows_per_shard` by at most one row.
    """

    global_batch: int
    num_shards: int

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.num_shards < 1:
            raise UsageError(
                f"cannot split a batch of {self.global_batch} rows over {self.num_shards} shards"
            )

    @property
    def rows_per_shard(self) -> int:
        """Rows of every shard, padding included."""
        return -(-self.global_batch // self.num_shards)

    @property
    def num_padding_rows(self) -> int:
        """Padding rows over all shards."""
        return self.rows_per_shard * self.num_shards - self.global_batch

    def shard_range(self, shard_index: int) -> tuple[int, int]:
        """Return the half-open range of global rows that are real in this shard; may be empty."""
        if not 0 <= shard_index < self.num_shards:
            raise UsageError(f"shard {shard_index} is not one of {self.num_shards}", shard_index=shard_index)
        starts, stops = self._bounds()
        return int(starts[shard_index]), int(stops[shard_index])

    def rows(self) -> NDArray[np.int64]:
        """Return the global row at each place, shape `[num_shards, rows_per_shard]`.

        A padding place repeats the shard's last real row (row 0 in a shard without one), so that it holds
        valid data; `weights` is zero there.
        """
        starts, stops = self._bounds()
        places = starts[:, None] + np.arange(self.rows_per_shard)
        last = np.where(stops > starts, stops - 1, 0)
        rows: NDArray[np.int64] = np.minimum(places, last[:, None])
        return rows

    def weights(self) -> NDArray[np.float32]:
        """Return 1 at each real row and 0 at padding, shape `[num_shards, rows_per_shard]`.

        `sum(weights * loss) / sum(weights)` over all shards is the mean over exactly the global batch.
        """
        starts, stops = self._bounds()
        return (starts[:, None] + np.arange(self.rows_per_shard) < stops[:, None]).astype(np.float32)

    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows, longer = divmod(self.global_batch, self.num_shards)
        index = np.arange(self.num_shards + 1, dtype=np.int64)
        edges = index * rows + np.minimum(index, longer)
        return edges[:-1], edges[1:]


def split_batch(global_batch: int, num_shards: int) -> BatchSplit:
    """Return the split of `global_batch` rows over `num_shards`; raises `UsageError` if either is below 1."""
    return BatchSplit(global_batch=global_batch, num_shards=num_shards)


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
