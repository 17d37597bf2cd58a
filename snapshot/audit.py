"""Checksums of everything that this process's devices hold of a state, stored in a snapshot or not.

Replicated state has copies that no snapshot takes; an audit looks at all of them, so that copies on three
slices or devices tell which one is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from reshard.copies import CHECKSUM_DTYPE, device_positions
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.checksum import checksum
from snapshot.device_buffers import (
    addressable_shard,
    byte_order,
    is_plain,
    memory_checksum,
    shard_bytes,
    start_copy_to_host,
)
from snapshot.tree import is_prng_key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How to read a leaf's copies: worked out once, good as long as the leaf looks the same."""

    sharding: Any
    shape: tuple[int, ...]
    dtype: Any
    order: Any  # of the elements in memory; None where only one is possible
    is_key: bool
    by_address: bool
    device_ids: tuple[int, ...]
    places: tuple[int, ...]
    nbytes: tuple[int, ...]


class Auditor:
    """Made once per world, for those of `hosts` that are in its mesh.

    `layout` is that of the state (`snapshot.tree.layout_of`), `device_ids` are those of the mesh in C order.
    """

    def __init__(self, layout: Layout, device_ids: Sequence[int], hosts: Iterable[HostId]) -> None:
        self._num_arrays = len(layout.arrays)
        positions = device_positions(layout)
        self._device_ids = {
            host: [device_ids[position] for position in positions[host]]
            for host in sorted(hosts)
            if host in positions
        }
        self._wanted = {device_id for own in self._device_ids.values() for device_id in own}
        self._plans: list[_Plan | None] = [None] * self._num_arrays

    def checksums(self, state: Any) -> dict[HostId, bytes]:
        """Return, for each host, the packed checksums in the order of `reshard.copies.CopyIndex.of_devices`.

        A leaf that is on one device or on the host alone counts for all devices. Nothing refers to the
        state's buffers afterwards. Raises UsageError when the state has another number of leaves.
        """
        leaves = jax.tree_util.tree_leaves(state)
        if len(leaves) != self._num_arrays:
            raise UsageError(f"the state has {len(leaves)} leaves, its layout {self._num_arrays} arrays")
        jax.block_until_ready(leaves)
        found = {
            host: np.empty((len(leaves), len(ids)), CHECKSUM_DTYPE) for host, ids in self._device_ids.items()
        }
        for index, leaf in enumerate(leaves):
            by_device, anywhere = self._of_leaf(index, leaf)
            for host, ids in self._device_ids.items():
                found[host][index] = [by_device.get(device_id, anywhere) for device_id in ids]
        return {host: table.tobytes() for host, table in found.items()}

    def _of_leaf(self, index: int, leaf: Any) -> tuple[dict[int, int], int]:
        """Return the checksums by device id, and that of some copy."""
        if not isinstance(leaf, jax.Array):
            return {}, checksum(np.asarray(leaf).tobytes())
        plan = self._plans[index]
        is_key = is_prng_key(leaf) if plan is None else plan.is_key
        array = jax.random.key_data(leaf) if is_key else leaf
        if plan is None or not _is_as_planned(plan, array):
            plan = self._plans[index] = self._plan(array, is_key=is_key)
        shards = [addressable_shard(array, place) for place in plan.places]
        if plan.by_address:
            found = [memory_checksum(shard, n) for shard, n in zip(shards, plan.nbytes, strict=True)]
        else:
            for shard in shards:
                start_copy_to_host(shard)
            found = [checksum(shard_bytes(shard)) for shard in shards]
        return dict(zip(plan.device_ids, found, strict=True)), found[0]

    def _plan(self, array: jax.Array, *, is_key: bool) -> _Plan:
        """Find the copies on the mesh's devices here; some copy, if those have none."""
        every = [(shard.device.id, place, shard.data) for place, shard in enumerate(array.addressable_shards)]
        chosen = [entry for entry in every if entry[0] in self._wanted] or every[:1]
        by_address = next(iter(array.devices())).platform == "cpu" and is_plain(array)
        return _Plan(
            sharding=array.sharding,
            shape=array.shape,
            dtype=array.dtype,
            order=byte_order(array) if by_address and array.ndim > 1 else None,
            is_key=is_key,
            by_address=by_address,
            device_ids=tuple(device_id for device_id, _, _ in chosen),
            places=tuple(place for _, place, _ in chosen),
            nbytes=tuple(int(data.nbytes) for _, _, data in chosen),
        )


def _is_as_planned(plan: _Plan, array: jax.Array) -> bool:
    sharding = array.sharding
    if not (sharding is plan.sharding or sharding == plan.sharding):
        return False
    if array.shape != plan.shape or array.dtype != plan.dtype:
        return False
    return plan.order is None or bool(byte_order(array) == plan.order)
