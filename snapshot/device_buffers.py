"""The bytes of device arrays, without keeping hold of them.

On the CPU backend device memory is host memory, and any numpy view of it that outlives the call silently
switches donation off for that array. So buffers are read by address, as raw bytes of any dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from snapshot.checksum import checksum

PINNED = "pinned_host"

_Key = TypeVar("_Key")


def is_plain(array: jax.Array) -> bool:
    """Tell whether device buffers hold the elements as numpy would: C order, whole bytes each.

    Elements of less than a byte (int4) are packed in device memory, though the array's size says not.
    """
    described: Any = array  # `format` is missing from the type of jax.Array
    layout = described.format.layout
    if layout is None or _bits(array.dtype) < 8:
        return False
    return tuple(layout.major_to_minor) == tuple(range(array.ndim)) and not layout.tiling


def byte_order(array: jax.Array) -> Any:
    """Return what decides the order of elements in the buffers: equal for equal orders, cheap to compare."""
    described: Any = array
    layout = getattr(described, "_pjrt_layout", None)  # private; ten times as fast as `format`
    return described.format.layout if layout is None else layout


def addressable_shard(array: jax.Array, index: int) -> jax.Array:
    """Return the single-device array on the `index`-th addressable device.

    `addressable_data` gives the first device's copy of a replicated array whatever the index (and is fast
    at it); `addressable_shards` is slow. So the array's own list is used where this JAX has it (a private
    name, only here).
    """
    if index == 0:
        return array.addressable_data(0)
    shards = getattr(array, "_arrays", None)
    shard: jax.Array = array.addressable_shards[index].data if shards is None else shards[index]
    return shard


def start_copy_to_host(shard: jax.Array) -> None:
    """Start the transfer of a single-device array to the host, if it is not there already."""
    if not _is_on_cpu(shard):  # on the CPU it would make a view that keeps the buffer from donation
        shard.copy_to_host_async()


def start_copies_to_host(shards: Sequence[tuple[_Key, jax.Array]]) -> list[tuple[_Key, Any]]:
    """Start the transfer of single-device arrays to host memory of their own, all together.

    The arrays may be donated as soon as this returns. Where devices can reach pinned host memory the
    transfers go on; else they have ended.
    """
    if all(_has_pinned_memory(shard) for _, shard in shards):
        places = [SingleDeviceSharding(_device(shard), memory_kind=PINNED) for _, shard in shards]
        copies = jax.device_put([shard for _, shard in shards], places, may_alias=False)
        return [(key, copy) for (key, _), copy in zip(shards, copies, strict=True)]
    for _, shard in shards:
        start_copy_to_host(shard)
    return [(key, host_value(shard)) for key, shard in shards]


def host_value(shard: jax.Array) -> npt.NDArray[Any]:
    """Return the elements of a single-device array, of any backend and memory layout, in host memory."""
    # On the CPU a view of the array itself would keep its buffer from donation; one of a copy does not.
    return np.asarray(jax.device_put(shard, _device(shard), may_alias=False) if _is_on_cpu(shard) else shard)


def shard_bytes(shard: jax.Array) -> bytes:
    """Return a copy of the C-order bytes of a single-device array, of any backend and memory layout."""
    return host_value(shard).tobytes()


def memory_checksum(shard: jax.Array, nbytes: int) -> int:
    """Return the checksum of the memory of a computed single-device array that `is_plain`, on the CPU.

    `nbytes` are the array's: asking an array for them is slow.
    """
    if not nbytes:
        return checksum(b"")
    return checksum(memoryview((ctypes.c_ubyte * nbytes).from_address(shard.unsafe_buffer_pointer())))


def _is_on_cpu(shard: jax.Array) -> bool:
    return bool(_device(shard).platform == "cpu")


def _device(shard: jax.Array) -> jax.Device:
    return next(iter(shard.devices()))


def _has_pinned_memory(shard: jax.Array) -> bool:
    return any(memory.kind == PINNED for memory in _device(shard).addressable_memories())


def _bits(dtype: Any) -> int:
    describe: Any = None
    if jnp.issubdtype(dtype, jnp.integer):
        describe = jnp.iinfo
    elif jnp.issubdtype(dtype, jnp.floating):
        describe = jnp.finfo
    return 8 * int(np.dtype(dtype).itemsize) if describe is None else int(describe(dtype).bits)
