"""Capturing a state: copying this host's share of it into the older slot, at every step.

The hot path of the whole project. Everything that stays the same while the world lives (offsets, which
device has which box, the static manifest) is worked out once; a step then costs, for each shard, one
memory copy, one hash, and a few microseconds.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import xxhash
from jax.sharding import NamedSharding

from reshard.boxes import Box, format_box
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.device_buffers import (
    addressable_shard,
    byte_order,
    is_plain,
    shard_bytes,
    start_copy_to_host,
)
from snapshot.manifest import encode_static, make_static
from snapshot.slot import SlotWriter, required_bytes
from snapshot.tree import HOST_LEAF_TYPES, box_of, flatten, is_prng_key, leaf_info

BLOCK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStats:
    """One capture: what was written, and how long the training loop was held.

    `wait_s` went by until the state was computed, `copy_s` is the rest. `checksums` are in the order of
    `Capturer.static.shards`.
    """

    step: int
    slot: str
    num_shards: int
    captured_bytes: int
    wait_s: float
    copy_s: float
    checksums: tuple[int, ...]


@dataclass(slots=True)
class _Leaf:
    """A leaf of the state: what it must look like, and which of its shards go where in the slot."""

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    byte_order: Any  # None where only one order is possible
    is_key: bool
    by_address: bool
    shards: tuple[tuple[int, int], ...]  # (index in the slot, addressable index)


class Capturer:
    """Captures one host's selection of shards; made once per world.

    `selection` is the (path, box) set that the redundancy policy gives this host (`reshard.captures`);
    `layout` that of the state (`snapshot.tree.layout_of`).
    """

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        host: HostId,
        selection: Iterable[tuple[str, Box]],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.static = make_static(host, layout, sorted(selection))
        self.slot_bytes = required_bytes(self.static)
        self._encoded = encode_static(self.static)
        self._nbytes = tuple(entry.nbytes for entry in self.static.shards)
        self._arena = arena
        self._clock = clock
        self._treedef: Any = None
        self._device_leaves: list[_Leaf] = []
        self._host_leaves: list[_Leaf] = []

    def warm_up(self, state: Any) -> None:
        """Do now what the first captures would do: check the state, map the slots and fault them in.

        Raises what `capture` raises. What the slots hold stays.
        """
        self._prepare(state)
        self._arena.map_slots()

    def capture(self, state: Any, *, step: int, generation: int, position: int) -> CaptureStats:
        """Copy the selection out of `state` into the oldest slot and commit it.

        When this returns the snapshot is complete and nothing refers to the state's buffers any more: it
        may be donated. Raises UsageError, naming the leaf, when the state does not fit the layout; on any
        error the slot is left empty and the newer snapshot as it was.
        """
        began_s = self._clock()
        leaves, treedef = jax.tree_util.tree_flatten(state)
        jax.block_until_ready(leaves)
        ready_s = self._clock()
        if not self._is_prepared(leaves, treedef):
            self._prepare(state)
        slot = self._arena.slot_for_write(self.slot_bytes, step)
        slot.prepare(self.static, self._encoded)
        slot.begin()
        checksums = [0] * len(self._nbytes)
        self._copy_devices(slot, leaves, checksums)
        self._copy_host(slot, leaves, checksums)
        slot.commit(step=step, generation=generation, position=position, checksums=checksums)
        return CaptureStats(
            step=step,
            slot=slot.path.name,
            num_shards=len(checksums),
            captured_bytes=sum(self._nbytes),
            wait_s=ready_s - began_s,
            copy_s=self._clock() - ready_s,
            checksums=tuple(checksums),
        )

    def _is_prepared(self, leaves: list[Any], treedef: Any) -> bool:
        if self._treedef is None or treedef != self._treedef:
            return False
        if any(not isinstance(leaves[leaf.index], HOST_LEAF_TYPES) for leaf in self._host_leaves):
            return False
        return all(_is_as_planned(leaf, leaves[leaf.index]) for leaf in self._device_leaves)

    def _copy_devices(self, slot: SlotWriter, leaves: list[Any], checksums: list[int]) -> None:
        views, addresses, nbytes = slot.shard_views, slot.shard_addresses, self._nbytes
        pending: list[tuple[int, jax.Array]] = []
        for leaf in self._device_leaves:
            array = jax.random.key_data(leaves[leaf.index]) if leaf.is_key else leaves[leaf.index]
            if leaf.by_address:
                for target, device_index in leaf.shards:
                    pointer = addressable_shard(array, device_index).unsafe_buffer_pointer()
                    checksums[target] = copy_and_hash(addresses[target], pointer, nbytes[target])
            else:
                pending += [(target, addressable_shard(array, index)) for target, index in leaf.shards]
        for _, shard in pending:
            start_copy_to_host(shard)
        for target, shard in pending:
            views[target][:] = shard_bytes(shard)
            checksums[target] = checksum(views[target])

    def _copy_host(self, slot: SlotWriter, leaves: list[Any], checksums: list[int]) -> None:
        for leaf in self._host_leaves:
            value = np.asarray(leaves[leaf.index])
            if value.shape != leaf.shape or value.dtype != leaf.dtype:
                raise UsageError(
                    f"leaf {leaf.path} is now {value.dtype}{value.shape}, in the layout "
                    f"{leaf.dtype}{leaf.shape}",
                    path=leaf.path,
                )
            for target, _ in leaf.shards:
                slot.shard_views[target][:] = value.tobytes()
                checksums[target] = checksum(slot.shard_views[target])

    def _prepare(self, state: Any) -> None:
        """Find, for each selected shard, the leaf and the local device it is read from."""
        self._treedef = None
        flat = flatten(state)
        arrays = {array.path: array for array in self.static.layout.arrays}
        if set(flat.paths) != set(arrays):
            odd = sorted(set(flat.paths) ^ set(arrays))
            raise UsageError(f"the state and the layout differ in {', '.join(odd[:5])}", paths=odd)
        targets: dict[str, dict[Box, int]] = {path: {} for path in arrays}
        for index, entry in enumerate(self.static.shards):
            targets[entry.path][entry.box] = index
        device_leaves: list[_Leaf] = []
        host_leaves: list[_Leaf] = []
        for index, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
            if targets[path]:
                planned = self._plan_leaf(index, arrays[path], leaf, targets[path])
                (host_leaves if planned.sharding is None else device_leaves).append(planned)
        self._device_leaves, self._host_leaves = device_leaves, host_leaves
        self._treedef = flat.treedef

    def _plan_leaf(self, index: int, array: ArrayLayout, leaf: Any, targets: dict[Box, int]) -> _Leaf:
        info = leaf_info(array.path, leaf)
        if tuple(info.shape) != array.shape or str(info.dtype) != array.dtype:
            raise UsageError(
                f"leaf {array.path} is {info.dtype}{tuple(info.shape)}, in the layout "
                f"{array.dtype}{array.shape}",
                path=array.path,
            )
        is_key, by_address = is_prng_key(leaf), False
        device_indexes = dict.fromkeys(targets, 0)
        if info.sharding is not None:
            data = jax.random.key_data(leaf) if is_key else leaf
            device_indexes = self._device_indexes(data)
            by_address = next(iter(data.devices())).platform == "cpu" and is_plain(data)
        for box in targets:
            if box not in device_indexes:
                raise UsageError(
                    f"no device of {self.static.host} has {array.path} {format_box(box)}: its sharding is "
                    f"{info.sharding}, not that of the layout",
                    path=array.path,
                    box=box,
                )
        return _Leaf(
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

    def _device_indexes(self, array: jax.Array) -> dict[Box, int]:
        """Return, for each box on this host, the addressable index of a device that has it."""
        hosts: dict[int, HostId] = {}
        mesh = self.static.layout.mesh
        if isinstance(array.sharding, NamedSharding) and array.sharding.mesh.size == mesh.num_devices:
            devices = array.sharding.mesh.devices.flat
            hosts = {device.id: host for device, host in zip(devices, mesh.hosts, strict=True)}
        found: dict[Box, int] = {}
        for index, shard in enumerate(array.addressable_shards):
            if hosts.get(shard.device.id, self.static.host) == self.static.host:
                found.setdefault(box_of(shard.index, array.shape), index)
        return found


def copy_and_hash(target: int, source: int, nbytes: int) -> int:
    """Copy memory between addresses and return the checksum of what was read.

    In blocks that stay in a processor's own cache between the two: a block is read from memory once. The
    source is hashed, so that a copy that went wrong is found like any other damage.
    """
    digest = _new_digest()
    for offset in range(0, nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, nbytes - offset)
        digest.update((ctypes.c_ubyte * size).from_address(source + offset))
        _memmove(target + offset, source + offset, size)
    return digest.intdigest()


_memmove = ctypes.memmove
_new_digest = xxhash.xxh3_64


def _is_as_planned(leaf: _Leaf, value: Any) -> bool:
    sharding = getattr(value, "sharding", None)
    same = sharding is leaf.sharding or sharding == leaf.sharding
    if not same or value.shape != leaf.shape or value.dtype != leaf.dtype:
        return False
    return leaf.byte_order is None or bool(byte_order(value) == leaf.byte_order)
