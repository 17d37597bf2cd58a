"""Snapshots of two hosts in which every element says of which step it is; imports no JAX."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reshard.boxes import Box, shape_of
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.manifest import StaticManifest, encode_static, make_static
from snapshot.slot import required_bytes

A, B = HostId(0), HostId(1)
SPLIT, WHOLE, EMPTY = "['split']", "['whole'][0]", ".empty"


def two_host_layout(num_rows: int = 8) -> Layout:
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=(A, B))
    return Layout(
        mesh=mesh,
        arrays=(
            ArrayLayout(path=SPLIT, shape=(num_rows, 16), dtype="float32", itemsize=4, spec=(("data",), ())),
            ArrayLayout(path=WHOLE, shape=(num_rows,), dtype="bfloat16", itemsize=2, spec=((),)),
            ArrayLayout(path=EMPTY, shape=(0, 3), dtype="float32", itemsize=4, spec=((), ())),
        ),
        elastic_axis="data",
    )


def static_of(host: HostId, *, num_rows: int = 8, both_halves: bool = False) -> StaticManifest:
    """Each host stores its half of `split` (or both) and all of the others."""
    half = num_rows // 2
    halves: tuple[Box, ...] = (((0, half), (0, 16)), ((half, num_rows), (0, 16)))
    kept = halves if both_halves else (halves[host.slice_index],)
    shards: list[tuple[str, Box]] = [(SPLIT, box) for box in kept]
    shards += [(WHOLE, ((0, num_rows),)), (EMPTY, ((0, 0), (0, 3)))]
    return make_static(host, two_host_layout(num_rows), shards)


def capture_step(
    arena: Arena,
    step: int,
    *,
    generation: int = 1,
    static: StaticManifest | None = None,
    value: float | None = None,
) -> None:
    """Capture a state all of whose elements are `value`, by default the step."""
    import ml_dtypes

    static = static or static_of(arena.host)
    slot = arena.slot_for_write(required_bytes(static), step)
    slot.prepare(static, encode_static(static))
    slot.begin()
    checksums = []
    for entry, view in zip(static.shards, slot.shard_views, strict=True):
        dtype = ml_dtypes.bfloat16 if entry.path == WHOLE else np.float32
        data = np.full(shape_of(entry.box), step if value is None else value, dtype).tobytes()
        view[:] = data
        checksums.append(checksum(data))
    slot.commit(step=step, generation=generation, position=step, checksums=checksums)


def make_arena(root: Path, host: HostId, *steps: int, job_id: str = "job") -> Arena:
    arena = Arena.create(job_id, host, root=root)
    arena.reserve(required_bytes(static_of(host, both_halves=True)))
    for step in steps:
        capture_step(arena, step)
    return arena
