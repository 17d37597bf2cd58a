"""The state that the snapshot benchmarks save and restore: the same as that of the peers' scripts.

Leaves of float32 with 1728 columns on a mesh ("fsdp", "tensor") of (devices / 2, 2), partitioned over both
axes. Import this before JAX is used: it asks for the virtual devices.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

DEVICES = 8
FEWER_DEVICES = 6
COLUMNS = 1728
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reshard.ids import HostId
from reshard.layout import Layout
from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.tree import layout_of

HOST = HostId(0)
STEP = 1


def sharding(num_devices: int) -> NamedSharding:
    devices = np.array(jax.devices()[:num_devices]).reshape(num_devices // 2, 2)
    return NamedSharding(Mesh(devices, ("fsdp", "tensor")), PartitionSpec("fsdp", "tensor"))


def shape_of_leaf(nbytes: float, num_leaves: int) -> tuple[int, int]:
    """The shape of each leaf, its rows a multiple of 24, so that they divide over 8 and over 6 devices."""
    return max(24, round(nbytes / num_leaves / 4 / COLUMNS / 24) * 24), COLUMNS


def make_state(nbytes: float, num_leaves: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shape, place = shape_of_leaf(nbytes, num_leaves), sharding(DEVICES)
    state = {
        f"layer{index:03}": jax.device_put(rng.standard_normal(shape, np.float32), place)
        for index in range(num_leaves)
    }
    # Made by the devices, so that the memory is theirs: what was handed in cannot be donated in place.
    made: dict[str, jax.Array] = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 0, tree))(state)
    return jax.block_until_ready(made)


def make_capturer(arena: Arena, state: Any, **options: Any) -> Capturer:
    """A capturer of the whole state, all devices counting as this one host's; the arena has room for it."""
    mesh = sharding(DEVICES).mesh
    layout: Layout = layout_of(state, mesh, {device.id: HOST for device in mesh.devices.flat})
    capturer = Capturer(arena, layout, HOST, captures(layout, 1)[HOST], **options)
    arena.reserve(capturer.slot_bytes)
    capturer.warm_up(state)
    return capturer


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a piece of work, and its result, once its arrays are computed."""
    began_s = time.perf_counter()
    result = jax.block_until_ready(work())
    return time.perf_counter() - began_s, result


@contextmanager
def snapshot_root() -> Iterator[Path]:
    """A folder in host memory that is removed at the end, SIGTERM included."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    root = Path(tempfile.mkdtemp(prefix="elastic-slices-bench-", dir="/dev/shm"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
