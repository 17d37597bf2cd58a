"""Arenas of a few hosts with a small state in them, as workers leave them, for tests of what agents do."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reshard.boxes import full_box, relative_slices
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.manifest import encode_static, make_static
from snapshot.slot import required_bytes

GENERATION = 3


def layout_of_hosts(num_slices: int) -> Layout:
    """`w` is split over the slices, `b` is on all of them."""
    hosts = tuple(HostId(index) for index in range(num_slices))
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(num_slices,), hosts=hosts)
    arrays = (
        ArrayLayout(path="['b']", shape=(5,), dtype="int8", itemsize=1),
        ArrayLayout(path="['w']", shape=(12, 3), dtype="float32", itemsize=4, spec=(("data",), ())),
    )
    return Layout(mesh=mesh, arrays=arrays, elastic_axis="data")


def elements(path: str, step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """What an array holds after a step."""
    if path == "['b']":
        return np.full(5, step, np.int8)
    return np.arange(36, dtype=np.float32).reshape(12, 3) + 100 * step


def capture_step(arena: Arena, layout: Layout, step: int, replicas: int) -> None:
    """What a worker does after a step."""
    static = make_static(arena.host, layout, captures(layout, replicas)[arena.host])
    slot = arena.slot_for_write(required_bytes(static), step)
    slot.prepare(static, encode_static(static))
    slot.begin()
    for entry, view in zip(static.shards, slot.shard_views, strict=True):
        whole = elements(entry.path, step)
        view[:] = whole[relative_slices(entry.box, full_box(whole.shape))].tobytes()
    checksums = [checksum(view) for view in slot.shard_views]
    slot.commit(step=step, generation=GENERATION, position=8 * step, checksums=checksums)


@contextlib.contextmanager
def made_arenas(layout: Layout, replicas: int, step: int) -> Iterator[dict[HostId, Arena]]:
    """The arenas of all hosts of a layout, with the state after `step`."""
    root = Path(tempfile.mkdtemp(prefix="elastic-slices-test-", dir="/dev/shm"))
    made = {host: Arena.create("job", host, root=root) for host in layout.mesh.distinct_hosts()}
    try:
        for host, arena in made.items():
            static = make_static(host, layout, captures(layout, replicas)[host])
            arena.reserve(required_bytes(static))
            capture_step(arena, layout, step, replicas)
        yield made
    finally:
        for arena in made.values():
            arena.close()
        shutil.rmtree(root)
