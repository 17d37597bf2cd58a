"""Building a state on the devices of this process from the shards its arena holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from reshard.boxes import Box, full_box
from reshard.errors import MissingShardError, UsageError
from reshard.layout import ArrayLayout
from snapshot.device_buffers import buffer_checksum
from snapshot.tree import LeafInfo, box_of, flatten, is_prng_key, key_impl, leaf_info, unflatten


class BoxSource(Protocol):
    """Where restore takes elements from; `snapshot.source.ShardSource` is one."""

    step: int
    arrays: dict[str, ArrayLayout]

    def read(self, path: str, box: Box) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a private C-order array of the box's elements, verified; MissingShardError if it cannot."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChecksum:
    """The checksum of what one local device holds of an array."""

    path: str
    box: Box
    device_id: int
    checksum: int


def restore(target: Any, source: BoxSource) -> Any:
    """Return the state of `source` in the form of `target`.

    `target` is a pytree of jax.ShapeDtypeStructs (or arrays) with shardings, any sharding whatever the
    snapshot's; numpy arrays and Python scalars in it come back as such. Device arrays are copies: they
    never alias the arena. Raises MissingShardError, naming array and box, when a part is nowhere intact,
    UsageError, naming the leaf, when shape or dtype differ from the snapshot's.
    """
    flat = flatten(target)
    leaves = [_restore_leaf(path, leaf, source) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    return unflatten(flat.treedef, leaves)


def device_checksums(state: Any) -> tuple[DeviceChecksum, ...]:
    """Return the checksum of every local device buffer of `state`, comparable with those of a manifest.

    Leaves that only the host has are left out.
    """
    flat = flatten(state)
    result: list[DeviceChecksum] = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if not isinstance(leaf, jax.Array):
            continue
        array = jax.random.key_data(leaf) if is_prng_key(leaf) else leaf
        for shard in array.addressable_shards:
            result.append(
                DeviceChecksum(
                    path=path,
                    box=box_of(shard.index, array.shape),
                    device_id=shard.device.id,
                    checksum=buffer_checksum(shard.data),
                )
            )
    return tuple(result)


def _restore_leaf(path: str, leaf: Any, source: BoxSource) -> Any:
    info = leaf_info(path, leaf)
    _check_stored(path, info, source)
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        value = source.read(path, full_box(info.shape)).view(info.dtype)
        return value if isinstance(leaf, np.ndarray) else type(leaf)(value.item())
    if isinstance(leaf, jax.Array) and not leaf.committed:
        info = replace(info, sharding=None)
    array = _restore_array(path, info, source)
    return jax.random.wrap_key_data(array, impl=key_impl(leaf)) if is_prng_key(leaf) else array


def _restore_array(path: str, info: LeafInfo, source: BoxSource) -> jax.Array:
    shape, sharding = tuple(info.shape), info.sharding
    if sharding is None:  # no device chosen: stays uncommitted, or a jitted step with a mesh would refuse it
        return jnp.array(source.read(path, full_box(shape)).view(info.dtype), copy=True)
    shards: list[jax.Array] = []
    by_box: dict[Box, np.ndarray[Any, np.dtype[Any]]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = full_box(shape) if index is None else box_of(index, shape)
        if box not in by_box:
            by_box[box] = source.read(path, box).view(info.dtype)
        place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(jax.device_put(by_box[box], place, may_alias=False))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=info.dtype)


def _check_stored(path: str, info: LeafInfo, source: BoxSource) -> None:
    stored = source.arrays.get(path)
    if stored is None:
        raise MissingShardError(path, full_box(tuple(info.shape)), source.step)
    if stored.shape != tuple(info.shape) or stored.dtype != str(info.dtype):
        raise UsageError(
            f"leaf {path} is {info.dtype}{tuple(info.shape)}, the snapshot of step {source.step} has "
            f"{stored.dtype}{stored.shape}",
            remedy="Restore into a state of the same shapes and dtypes as was captured.",
            path=path,
        )
