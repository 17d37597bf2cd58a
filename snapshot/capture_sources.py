"""Where the bytes of the selected shards lie at a given step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from reshard.errors import UsageError
from snapshot.capture_plan import KEEP_LEAVES, CapturePlan
from snapshot.device_buffers import addressable_shard, host_value, start_copy_to_host

Source = tuple[int, int, Any]
"""(index in the slot, address in this process, what keeps the memory there): C-order bytes of a shard."""


def device_sources(plan: CapturePlan, leaves: list[Any]) -> list[Source]:
    """Return the selected shards on devices, those that cannot be read in place brought to the host."""
    sources: list[Source] = []
    others: list[tuple[int, jax.Array]] = []
    for leaf in plan.device_leaves:
        array = _data(leaves[leaf.index], leaf.is_key)
        for target, index in leaf.shards:
            shard = addressable_shard(array, index)
            if leaf.by_address:
                sources.append((target, shard.unsafe_buffer_pointer(), shard))
            else:
                others.append((target, shard))
    for _, shard in others:
        start_copy_to_host(shard)
    return sources + [source_of(target, host_value(shard)) for target, shard in others]


def selected_shards(plan: CapturePlan, leaves: list[Any]) -> list[tuple[int, jax.Array]]:
    """Return, for each selected shard on a device, its index in the slot and its single-device array."""
    shards: list[tuple[int, jax.Array]] = []
    for leaf in plan.device_leaves:
        array = _data(leaves[leaf.index], leaf.is_key)
        shards += [(target, addressable_shard(array, index)) for target, index in leaf.shards]
    return shards


def host_sources(plan: CapturePlan, leaves: list[Any]) -> list[Source]:
    """Return the shards of leaves that only the host has."""
    return [source_of(target, value) for target, value in host_values(plan, leaves)]


def host_values(plan: CapturePlan, leaves: list[Any]) -> list[tuple[int, npt.NDArray[Any]]]:
    """Return the values of leaves that only the host has, each with its index in the slot.

    Raises UsageError, naming the leaf, when shape or dtype are no longer those of the layout.
    """
    values: list[tuple[int, npt.NDArray[Any]]] = []
    for leaf in plan.host_leaves:
        value = np.asarray(leaves[leaf.index])
        if value.shape != leaf.shape or value.dtype != leaf.dtype:
            raise UsageError(
                f"leaf {leaf.path} is now {value.dtype}{value.shape}, in the layout {leaf.dtype}{leaf.shape}",
                remedy=KEEP_LEAVES,
                path=leaf.path,
            )
        values += [(target, value) for target, _ in leaf.shards]
    return values


def source_of(target: int, value: npt.NDArray[Any]) -> Source:
    """Return an array's elements, in C order, as the source of a shard."""
    ordered = np.ascontiguousarray(value)
    return target, ordered.ctypes.data, ordered


def _data(leaf: Any, is_key: bool) -> jax.Array:
    data: jax.Array = jax.random.key_data(leaf) if is_key else leaf
    return data
