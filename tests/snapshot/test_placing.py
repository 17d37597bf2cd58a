"""Restoring reads each shard once, passes over damaged copies, and leaves arrays that are nobody else's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_helpers import (
    HOSTS,
    captured,
    device_checksums,
    every_kind_of_leaf,
    hosts_of,
    make_mesh,
    put,
    source_of,
)
from snapshot_helpers import flip

from reshard.boxes import Box
from reshard.errors import InvariantBrokenError, MissingShardError
from snapshot import placing
from snapshot.arena import Arena
from snapshot.restore import restore
from snapshot.scratch import Scratch
from snapshot.tree import flatten, layout_of, target_of

ROWS = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)


@pytest.fixture(autouse=True)
def _use_threads_however_little_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshot.copying.MIN_BYTES_A_THREAD", 1)


@pytest.fixture(autouse=True, params=[placing.MAX_TOGETHER_BYTES, 0], ids=["together", "box by box"])
def _put_arrays_in_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshot.placing.MAX_TOGETHER_BYTES", request.param)


class Counting:
    """A source that counts the reads of each stored box."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.reads: Counter[tuple[str, Box]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read_stored(self, path: str, box: Box, out: npt.NDArray[np.uint8]) -> bool:
        self.reads[path, box] += 1
        found: bool = self._source.read_stored(path, box, out)
        return found


def on(num_devices: int, axes: tuple[int, int] | None = None) -> Mesh:
    shape = axes or (num_devices // 2, 2)
    return Mesh(np.array(jax.devices()[:num_devices]).reshape(shape), ("data", "model"))


def struct(mesh: Mesh, *spec: Any, shape: tuple[int, ...] = (24, 8), dtype: Any = np.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def assert_values(restored: jax.Array, expected: npt.NDArray[Any]) -> None:
    for shard in restored.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), expected[shard.index]), shard.index


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("mesh_of", "spec"),
    [
        ((8, None), ("data", "model")),
        ((6, None), ("data", "model")),
        ((6, None), (None, "model")),
        ((6, (2, 3)), ("data",)),
        ((8, (2, 4)), ("model", "data")),
        ((2, (1, 2)), ()),
    ],
)
def test_each_shard_is_read_once_whatever_boxes_need_it(
    root: Path, num_threads: int, mesh_of: tuple[int, Any], spec: tuple[Any, ...]
) -> None:
    mesh = make_mesh()
    state = [put(mesh, ROWS + 1000 * index, "data", "model") for index in range(5)]
    with captured(root, state, mesh) as arenas:
        source = Counting(source_of(arenas))
        target = [struct(on(*mesh_of), *spec) for _ in state]
        restored = restore(target, source, num_threads=num_threads, count_writes=True)
        for index, leaf in enumerate(restored):
            assert_values(leaf, ROWS + 1000 * index)
        assert source.reads == {
            (f"[{leaf}]", box): 1 for leaf in range(5) for box in source.boxes(f"[{leaf}]")
        }
        source.close()


def test_damaged_copy_is_passed_over_for_another_and_that_for_parts_of_others(root: Path) -> None:
    mesh = make_mesh()
    layout = layout_of({"w": put(mesh, ROWS, "data")}, mesh, hosts_of(mesh), elastic_axis="data")

    def part(first: int, last: int) -> tuple[str, Box, bytes]:
        return "['w']", ((first, last), (0, 8)), ROWS[first:last].tobytes()

    held = {0: [part(0, 6), part(6, 12)], 1: [part(6, 12), part(12, 24)], 2: [part(4, 9), part(9, 12)]}
    arenas = []
    for index, parts in held.items():
        arenas.append(Arena.create("job", HOSTS[index], root=root))
        arenas[-1].write_stage(layout, parts, step=1, generation=1, position=0)
    target = {"w": struct(on(4), "data")}  # rows 0 to 12, and 12 to 24
    files = [arena.directory / "stage" for arena in arenas]
    for num_damaged, file in enumerate((None, files[0], files[1])):
        if file is not None:
            flip(file, file.read_bytes().index(ROWS[8].tobytes()))
        source = source_of(arenas)
        restored = restore(target, source)
        source.close()
        assert_values(restored["w"], ROWS)
        assert len(source.rejected) == num_damaged
    flip(files[2], files[2].read_bytes().index(ROWS[8].tobytes()))
    source = source_of(arenas)
    with pytest.raises(MissingShardError, match=r"\['w'\]\", box \[6:9, 0:8\]"):
        restore(target, source)
    source.close()
    for arena in arenas:
        arena.unlink()


def test_restored_arrays_share_no_memory_and_are_donated_in_place(root: Path) -> None:
    mesh = make_mesh()
    state = [
        put(mesh, ROWS + index, *spec) for index, spec in enumerate([("data", "model"), (), ("data",)] * 3)
    ]
    with captured(root, state, mesh) as arenas:
        for fewer in (make_mesh(), on(6)):
            source = source_of(arenas)
            restored = restore(target_of(state, fewer), source)
            source.close()
            buffers = [
                shard.data.unsafe_buffer_pointer() for leaf in restored for shard in leaf.addressable_shards
            ]
            assert len(set(buffers)) == len(buffers)
            step = jax.jit(lambda tree: [leaf + 1 for leaf in tree], donate_argnums=0)
            after = jax.block_until_ready(step(restored))
            assert all(leaf.is_deleted() for leaf in restored)
            again = [
                shard.data.unsafe_buffer_pointer() for leaf in after for shard in leaf.addressable_shards
            ]
            assert set(again) == set(buffers)  # not a byte more was needed
            for index, leaf in enumerate(after):
                assert_values(leaf, ROWS + index + 1)


def test_buffers_that_are_used_again_cannot_become_arrays_in_place() -> None:
    scratch = Scratch()
    for nbytes in (1, 64, 4096, 3 << 20, 64):
        buffer = scratch.take(nbytes)
        assert len(buffer) == nbytes
        assert buffer.ctypes.data % 64 == 32
        placed = jax.device_put(buffer, jax.devices()[1])
        assert placed.unsafe_buffer_pointer() != buffer.ctypes.data
        scratch.give_back(buffer)
    first, second = scratch.take(64), scratch.take(64)
    assert not np.shares_memory(first.base, second.base)


def test_array_that_was_made_in_place_all_the_same_is_copied(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshot.scratch._OFFSET_BYTES", 0)  # as if JAX could use any buffer
    mesh = make_mesh()
    state = [put(mesh, ROWS + index, "data") for index in range(4)]
    with captured(root, state, mesh) as arenas:
        source = source_of(arenas)
        restored = restore(target_of(state), source, num_threads=1)
        source.close()
    for index, leaf in enumerate(restored):
        assert_values(leaf, ROWS + index)


def test_helpers_keep_64_bit_numbers_where_the_caller_has_them(root: Path) -> None:
    mesh = make_mesh()
    with jax.enable_x64(True):
        state = [put(mesh, ROWS.astype(np.float64) * np.pi + index, "data") for index in range(6)]
        with captured(root, state, mesh) as arenas:
            source = source_of(arenas)
            restored = restore(target_of(state), source, num_threads=3)
            source.close()
        for index, leaf in enumerate(restored):
            assert leaf.dtype == jnp.float64
            assert_values(leaf, ROWS.astype(np.float64) * np.pi + index)


@pytest.mark.parametrize(
    ("doctor", "message"),
    [
        (lambda cover: cover[:-1], "0 to 1 times"),
        (lambda cover: [*cover, cover[0]], "1 to 2 times"),
        (lambda cover: [*cover[:-1], cover[0]], "0 to 2 times"),
    ],
    ids=["gap", "overlap", "wrong box"],
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_counting_finds_a_box_that_is_put_together_wrongly(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int, doctor: Any, message: str
) -> None:
    mesh = make_mesh()
    state = [put(mesh, ROWS + index, "data", "model") for index in range(3)]
    cover = placing._cover
    monkeypatch.setattr("snapshot.placing._cover", lambda box, stored: doctor(cover(box, stored)))
    with captured(root, state, mesh) as arenas:
        source = source_of(arenas)
        target = [struct(on(4, (2, 2)), "data", "model") for _ in state]
        restore(target, source, num_threads=num_threads)  # unnoticed: what it costs is paid when debugging
        with pytest.raises(InvariantBrokenError, match=message) as info:
            restore(target, source, num_threads=num_threads, count_writes=True)
        assert info.value.path in ("[0]", "[1]", "[2]")
        source.close()


def test_threads_restore_every_kind_of_leaf(root: Path) -> None:
    state = every_kind_of_leaf(make_mesh())
    with captured(root, state, make_mesh()) as arenas:
        source = Counting(source_of(arenas))
        restored = restore(target_of(state), source, num_threads=4, count_writes=True)
        source.close()
    assert device_checksums(restored) == device_checksums(state)
    assert flatten(restored).paths == flatten(state).paths
    assert max(source.reads.values()) == 1
