"""Which leaf and which local device each selected shard is read from: worked out once, then only compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax

from reshard.boxes import Box, format_box
from reshard.errors import UsageError
from reshard.layout import ArrayLayout
from snapshot.device_buffers import byte_order, is_plain
from snapshot.manifest import StaticManifest
from snapshot.shardings import box_of
from snapshot.tree import HOST_LEAF_TYPES, flatten, is_prng_key, leaf_info

KEEP_LEAVES = (
    "Keep every leaf's shape and dtype as `init` made them; it makes arrays of Python numbers (int32, say)."
)
"""What to do about a leaf that is not what the layout says."""


@dataclass(slots=True)
class PlannedLeaf:
    """A leaf of the state: what it must look like, and which of its shards go where in the slot.

    `shards` are pairs of (index in the slot, addressable index). `by_address`: its buffers are host memory
    and hold the elements as a snapshot does. `byte_order` is None where only one order is possible.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    byte_order: Any
    is_key: bool
    by_address: bool
    shards: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """Where the selected shards of a state come from; holds nothing of the state itself."""

    treedef: Any
    device_leaves: tuple[PlannedLeaf, ...]
    host_leaves: tuple[PlannedLeaf, ...]

    def fits(self, leaves: list[Any], treedef: Any) -> bool:
        """Tell whether a state (taken apart) still is as it was when planned."""
        if treedef != self.treedef:
            return False
        if any(not isinstance(leaves[leaf.index], HOST_LEAF_TYPES) for leaf in self.host_leaves):
            return False
        return all(_is_as_planned(leaf, leaves[leaf.index]) for leaf in self.device_leaves)


def plan_capture(
    state: Any, static: StaticManifest, device_ids: Collection[int] | None = None
) -> CapturePlan:
    """Find, for each shard of `static`, the leaf and the local device it is read from.

    `device_ids` are those of the host's devices, None for all of this process. Raises UsageError, naming
    the leaf, when the state does not fit the layout.
    """
    flat = flatten(state)
    arrays = {array.path: array for array in static.layout.arrays}
    if set(flat.paths) != set(arrays):
        odd = sorted(set(flat.paths) ^ set(arrays))
        raise UsageError(f"the state and the layout differ in {', '.join(odd[:5])}", paths=odd)
    targets: dict[str, dict[Box, int]] = {path: {} for path in arrays}
    for index, entry in enumerate(static.shards):
        targets[entry.path][entry.box] = index
    device_leaves: list[PlannedLeaf] = []
    host_leaves: list[PlannedLeaf] = []
    for index, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
        if targets[path]:
            planned = _plan_leaf(index, arrays[path], leaf, targets[path], static, device_ids)
            (host_leaves if planned.sharding is None else device_leaves).append(planned)
    return CapturePlan(
        treedef=flat.treedef, device_leaves=tuple(device_leaves), host_leaves=tuple(host_leaves)
    )


def _plan_leaf(
    index: int,
    array: ArrayLayout,
    leaf: Any,
    targets: dict[Box, int],
    static: StaticManifest,
    device_ids: Collection[int] | None,
) -> PlannedLeaf:
    info = leaf_info(array.path, leaf)
    if tuple(info.shape) != array.shape or str(info.dtype) != array.dtype:
        raise UsageError(
            f"leaf {array.path} is {info.dtype}{tuple(info.shape)}, in the layout {array.dtype}{array.shape}",
            remedy=KEEP_LEAVES,
            path=array.path,
        )
    is_key, by_address = is_prng_key(leaf), False
    device_indexes = dict.fromkeys(targets, 0)
    if info.sharding is not None:
        data = jax.random.key_data(leaf) if is_key else leaf
        device_indexes = _device_indexes(data, device_ids)
        by_address = next(iter(data.devices())).platform == "cpu" and is_plain(data)
    for box in targets:
        if box not in device_indexes:
            raise UsageError(
                f"no device of {static.host} has {array.path} {format_box(box)}: its sharding is "
                f"{info.sharding}, not that of the layout",
                path=array.path,
                box=box,
            )
    return PlannedLeaf(
        index=index,
        path=array.path,
        shape=tuple(info.shape) if info.sharding is None else leaf.shape,
        dtype=info.dtype if info.sharding is None else leaf.dtype,
        sharding=None if info.sharding is None else leaf.sharding,
        byte_order=byte_order(leaf) if by_address and not is_key and len(leaf.shape) > 1 else None,
        is_key=is_key,
        by_address=by_address,
        shards=tuple((target, device_indexes[box]) for box, target in targets.items()),
    )


def _device_indexes(array: jax.Array, device_ids: Collection[int] | None) -> dict[Box, int]:
    """Return, for each box on the host's devices, the addressable index of one that has it.

    An array on none of them (on one device of a process that plays several hosts) is read where it is.
    """
    shards = list(enumerate(array.addressable_shards))
    own = [entry for entry in shards if device_ids is None or entry[1].device.id in device_ids]
    found: dict[Box, int] = {}
    for index, shard in own or shards:
        found.setdefault(box_of(shard.index, array.shape), index)
    return found


def _is_as_planned(leaf: PlannedLeaf, value: Any) -> bool:
    sharding = getattr(value, "sharding", None)
    same = sharding is leaf.sharding or sharding == leaf.sharding
    if not same or value.shape != leaf.shape or value.dtype != leaf.dtype:
        return False
    return leaf.byte_order is None or bool(byte_order(value) == leaf.byte_order)
