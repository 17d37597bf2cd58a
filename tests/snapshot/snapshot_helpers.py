"""Small states and slots shared by the tests of `snapshot`; imports no JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.manifest import Manifest, StaticManifest, encode_static, make_static
from snapshot.slot import SlotWriter, allocate_slot, required_bytes

HOST = HostId(1)
REPOSITORY = Path(__file__).parents[2]


def small_layout() -> Layout:
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=(HostId(0), HostId(1)))
    return Layout(
        mesh=mesh,
        arrays=(
            ArrayLayout(path="w", shape=(4, 3), dtype="float32", itemsize=4, spec=(("data",), ())),
            ArrayLayout(path="b", shape=(5,), dtype="int8", itemsize=1, spec=((),)),
            ArrayLayout(path="empty", shape=(0, 3), dtype="float32", itemsize=4, spec=((), ())),
        ),
        elastic_axis="data",
    )


def small_static() -> StaticManifest:
    shards = [("b", ((0, 5),)), ("empty", ((0, 0), (0, 3))), ("w", ((2, 4), (0, 3)))]
    return make_static(HOST, small_layout(), shards)


def shard_data(static: StaticManifest, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(entry.nbytes) for entry in static.shards]


def write(writer: SlotWriter, step: int, generation: int = 1) -> list[bytes]:
    """Write the snapshot of a step, whose bytes are a function of the step, and return them."""
    static = small_static()
    writer.prepare(static, encode_static(static))
    writer.begin()
    data = shard_data(static, step)
    for view, payload in zip(writer.shard_views, data, strict=True):
        view[:] = payload
    writer.commit(
        step=step,
        generation=generation,
        position=10 * step,
        checksums=[checksum(payload) for payload in data],
    )
    return data


def write_into(arena: Arena, step: int, generation: int = 1) -> list[bytes]:
    return write(arena.slot_for_write(required_bytes(small_static()), step), step, generation)


def make_slot(path: Path, step: int = 7) -> list[bytes]:
    allocate_slot(path, required_bytes(small_static()))
    writer = SlotWriter(path)
    data = write(writer, step)
    writer.close()
    return data


def reserve(arena: Arena) -> None:
    arena.reserve(required_bytes(small_static()), journal_record_bytes=512, journal_records=8)


def steps(manifests: tuple[Manifest, ...]) -> list[int]:
    return [manifest.step for manifest in manifests]


def start_python(code: str, *args: object) -> subprocess.Popen[str]:
    """Start a Python child that can import this repository and these helpers; talk to it over pipes."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY
    )


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
