"""Arrays that are to be made on the devices of this process, out of boxes in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from reshard.boxes import Box, volume
from snapshot.device_buffers import addressable_shard
from snapshot.placing import Elements
from snapshot.shardings import box_of


@dataclass(eq=False, slots=True, kw_only=True)
class TargetArray:
    """An array that is to be made, and the box that each device of this process has of it, as JAX orders
    them.

    `enable_x64` is that of the thread that asked for it: it may hold there only.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    boxes: dict[jax.Device, Box]
    enable_x64: bool
    _array: jax.Array | None = None
    _shards: dict[jax.Device, jax.Array] = field(default_factory=dict)

    def box_nbytes(self, box: Box) -> int:
        """Bytes of a box of this array."""
        return volume(box) * self.dtype.itemsize

    def missing(self) -> tuple[Box, ...]:
        """Return the distinct boxes that are not on all their devices yet."""
        if self._array is not None:
            return ()
        return tuple(dict.fromkeys(box for device, box in self.boxes.items() if device not in self._shards))

    def put(self, values: Mapping[Box, Elements]) -> None:
        """Copy these boxes to their devices; their memory is free again when this returns.

        All boxes of an array in one call cost far less than one by one. Different boxes may be put by
        different threads at once.
        """
        typed = {box: value.view(self.dtype) for box, value in values.items()}
        devices = [device for device, box in self.boxes.items() if box in typed]
        with jax.enable_x64(self.enable_x64):
            if len(devices) == len(self.boxes):
                made = [self._make(self.shape, self.sharding, lambda index: typed[box_of(index, self.shape)])]
            else:
                made = [self._make_shard(device, typed[self.boxes[device]]) for device in devices]
            jax.block_until_ready(made)
            made = [_own(array, typed.values()) for array in made]
        if len(devices) == len(self.boxes):
            self._array = made[0]
        else:
            self._shards.update(zip(devices, made, strict=True))

    def _make_shard(self, device: jax.Device, value: Elements) -> jax.Array:
        place = SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind)
        return self._make(value.shape, place, lambda _: value)

    def _make(self, shape: tuple[int, ...], sharding: Any, value_of: Callable[[Any], Elements]) -> jax.Array:
        made: jax.Array = jax.make_array_from_callback(shape, sharding, value_of, dtype=self.dtype)
        return made

    def finish(self) -> jax.Array:
        """Return the array, all of whose boxes were put."""
        if self._array is None:
            shards = [self._shards[device] for device in self.boxes]
            self._array = jax.make_array_from_single_device_arrays(
                self.shape, self.sharding, shards, dtype=self.dtype
            )
        return self._array


def _own(array: jax.Array, values: Iterable[Elements]) -> jax.Array:
    """Return an array in memory of its own: a copy, should one have been made of host memory in place."""
    if not array.nbytes or next(iter(array.devices())).platform != "cpu":
        return array
    ranges = [(value.ctypes.data, value.ctypes.data + value.nbytes) for value in values]
    for index in range(len(array.addressable_shards)):
        at = addressable_shard(array, index).unsafe_buffer_pointer()
        if any(first <= at < last for first, last in ranges):
            copied: jax.Array = jax.device_put(array, array.sharding, may_alias=False)
            copied.block_until_ready()
            return copied
    return array
