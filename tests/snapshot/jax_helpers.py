"""A mesh of four hosts with two devices each, a state with every kind of leaf, and its snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reshard.boxes import Box
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.checksum import checksum
from snapshot.device_buffers import shard_bytes
from snapshot.manifest import Manifest
from snapshot.shardings import box_of
from snapshot.slot_reader import SlotReader
from snapshot.source import ShardSource
from snapshot.tree import flatten, is_prng_key, layout_of

HOSTS = tuple(HostId(index) for index in range(4))


def make_mesh(num_slices: int = 4) -> Mesh:
    devices = np.array(jax.devices()[: 2 * num_slices]).reshape(num_slices, 2)
    return Mesh(devices, ("data", "model"))


def hosts_of(mesh: Mesh) -> dict[int, HostId]:
    return {device.id: HostId(index // 2) for index, device in enumerate(mesh.devices.flat)}


def device_ids_of(mesh: Mesh, host: HostId) -> list[int]:
    return [device_id for device_id, owner in hosts_of(mesh).items() if owner == host]


def device_checksums(state: Any) -> dict[tuple[str, Box, int], int]:
    """The checksum of what each local device holds of each array, by path, box and device id."""
    flat = flatten(state)
    found: dict[tuple[str, Box, int], int] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, jax.Array):
            array = jax.random.key_data(leaf) if is_prng_key(leaf) else leaf
            for shard in array.addressable_shards:
                box = box_of(shard.index, array.shape)
                found[path, box, shard.device.id] = checksum(shard_bytes(shard.data))
    return found


def put(mesh: Mesh, value: Any, *spec: Any) -> jax.Array:
    placed: jax.Array = jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))
    return placed


def every_kind_of_leaf(mesh: Mesh) -> dict[str, Any]:
    ramp = np.arange(96).reshape(24, 4)
    state: dict[str, Any] = {
        "float32": put(mesh, (ramp / 7).astype(np.float32), "data", "model"),
        "bfloat16": put(mesh, jnp.asarray(ramp, jnp.bfloat16), None, "model"),
        "int8": put(mesh, ramp.astype(np.int8), ("data", "model")),
        "bool": put(mesh, ramp % 3 == 0, "data"),
        "float8": put(mesh, jnp.asarray(ramp, jnp.float8_e4m3fn)),
        "int4": put(mesh, jnp.asarray(ramp % 16 - 8, jnp.int4), "data"),
        "uint2": put(mesh, jnp.asarray(ramp % 4, jnp.uint2)),
        "float4": put(mesh, jnp.asarray(ramp % 7, jnp.float4_e2m1fn), None, "model"),
        "complex": put(mesh, ramp.astype(np.complex64) * 1j, "model"),
        "nan": put(mesh, np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)),
        "scalar": put(mesh, np.float32(3.5)),
        "empty": put(mesh, np.zeros((0, 4), np.float32)),
        "key": put(mesh, jax.random.key(3)),
        "keys": put(mesh, jax.random.split(jax.random.key(4, impl="rbg"), 24), "data"),
        "single": jnp.int32(5),
        "numpy": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "numpy_scalar": np.float64(0.1),
        "int": 2**40,
        "float": 0.1,
        "flag": True,
    }
    return state


def as_bytes(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    value = np.asarray(leaf)
    return str(value.dtype), value.shape, value.tobytes()


@contextmanager
def captured(
    root: Path, state: Any, mesh: Mesh, *, replicas: int = 2, step: int = 1
) -> Iterator[list[Arena]]:
    """Capture a state on all hosts of the mesh and yield their arenas."""
    layout: Layout = layout_of(state, mesh, hosts_of(mesh), elastic_axis="data")
    arenas: list[Arena] = []
    for host, selection in captures(layout, replicas).items():
        arena = Arena.create("job", host, root=root)
        arenas.append(arena)
        capturer = Capturer(arena, layout, host, selection, device_ids=device_ids_of(mesh, host))
        arena.reserve(capturer.slot_bytes)
        capturer.capture(state, step=step, generation=1, position=step * 8)
    try:
        yield arenas
    finally:
        for arena in arenas:
            arena.unlink()


def source_of(arenas: list[Arena], step: int = 1) -> ShardSource:
    """Return a source over several hosts' slots at once, as if the missing shards had been staged."""
    opened: list[tuple[SlotReader, Manifest]] = []
    for path in (path for arena in arenas for path in arena.slot_files() if path.exists()):
        reader = SlotReader(path)
        manifest = reader.read_manifest()
        if manifest is not None and manifest.step == step:
            opened.append((reader, manifest))
        else:
            reader.close()
    return ShardSource(step, opened)
