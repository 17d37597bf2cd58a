"""The bytes of device arrays, without keeping hold of them.

On the CPU backend device memory is host memory, and any numpy view of it that outlives the call silently
switches donation off for that array. So buffers are read by address, as raw bytes of any dtype.
"""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from snapshot.checksum import checksum


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


def shard_bytes(shard: jax.Array) -> bytes:
    """Return a copy of the C-order bytes of a single-device array, of any backend and memory layout."""
    if not _is_on_cpu(shard):
        return np.asarray(shard).tobytes()
    # A view of the array itself would keep its buffer from donation; one of a copy does not.
    return np.asarray(jnp.array(shard, copy=True)).tobytes()


def buffer_checksum(shard: jax.Array) -> int:
    """Return the checksum of the C-order bytes of a single-device array."""
    if shard.nbytes == 0 or not _is_on_cpu(shard) or not is_plain(shard):
        return checksum(shard_bytes(shard))
    shard.block_until_ready()
    return checksum(memoryview((ctypes.c_ubyte * shard.nbytes).from_address(shard.unsafe_buffer_pointer())))


def _is_on_cpu(shard: jax.Array) -> bool:
    return bool(next(iter(shard.devices())).platform == "cpu")


def _bits(dtype: Any) -> int:
    describe: Any = None
    if jnp.issubdtype(dtype, jnp.integer):
        describe = jnp.iinfo
    elif jnp.issubdtype(dtype, jnp.floating):
        describe = jnp.finfo
    return 8 * int(np.dtype(dtype).itemsize) if describe is None else int(describe(dtype).bits)
