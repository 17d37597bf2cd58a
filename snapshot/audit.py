"""Checksums of everything that this process's devices hold of a state, stored in a snapshot or not.

Replicated state has copies that no snapshot takes; an audit looks at all of them, so that copies on three
slices or devices tell which one is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from reshard.copies import CHECKSUM_DTYPE, device_positions
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.checksum import checksum
from snapshot.device_buffers import addressable_shard, is_plain, shard_bytes, start_copy_to_host
from snapshot.tree import is_prng_key


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
        self._local: dict[Any, list[tuple[int, int]]] = {}

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
            by_device, anywhere = self._of_leaf(leaf)
            for host, ids in self._device_ids.items():
                found[host][index] = [by_device.get(device_id, anywhere) for device_id in ids]
        return {host: table.tobytes() for host, table in found.items()}

    def _of_leaf(self, leaf: Any) -> tuple[dict[int, int], int]:
        """Return the checksums by device id, and that of some copy."""
        if not isinstance(leaf, jax.Array):
            return {}, checksum(np.asarray(leaf).tobytes())
        array = jax.random.key_data(leaf) if is_prng_key(leaf) else leaf
        shards = [(device_id, addressable_shard(array, place)) for device_id, place in self._places(array)]
        if _is_on_cpu(array) and is_plain(array):
            by_device = {device_id: _memory_checksum(shard) for device_id, shard in shards}
        else:
            for _, shard in shards:
                start_copy_to_host(shard)
            by_device = {device_id: checksum(shard_bytes(shard)) for device_id, shard in shards}
        return by_device, next(iter(by_device.values()))

    def _places(self, array: jax.Array) -> list[tuple[int, int]]:
        """Return (device id, addressable index) of the mesh's devices here; of any one, if it has none."""
        known = self._local.get(array.sharding)
        if known is None:
            every = [(shard.device.id, place) for place, shard in enumerate(array.addressable_shards)]
            known = [entry for entry in every if entry[0] in self._wanted] or every[:1]
            self._local[array.sharding] = known
        return known


def _memory_checksum(shard: jax.Array) -> int:
    nbytes = shard.nbytes
    if not nbytes:
        return checksum(b"")
    return checksum(memoryview((ctypes.c_ubyte * nbytes).from_address(shard.unsafe_buffer_pointer())))


def _is_on_cpu(array: jax.Array) -> bool:
    return bool(next(iter(array.devices())).platform == "cpu")
