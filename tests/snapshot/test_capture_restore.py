"""What is restored equals, bit for bit, what was captured; and capturing does not hinder training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as DeviceLayout
from jax.sharding import NamedSharding, PartitionSpec
from jax_helpers import (
    HOSTS,
    as_bytes,
    captured,
    device_checksums,
    device_ids_of,
    every_kind_of_leaf,
    hosts_of,
    make_mesh,
    put,
    source_of,
)
from snapshot_helpers import flip

from reshard.errors import MissingShardError, UsageError
from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.restore import check_complete, restore
from snapshot.tree import flatten, layout_of, target_of


def assert_same(restored: Any, expected: Any) -> None:
    left, right = flatten(restored), flatten(expected)
    assert left.paths == right.paths
    for path, one, other in zip(left.paths, left.leaves, right.leaves, strict=True):
        assert type(one) is type(other), path
        assert as_bytes(one) == as_bytes(other), path
        if isinstance(other, jax.Array):
            assert one.dtype == other.dtype, path


def addresses_of(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def one_host(root: Path, state: Any, replicas: int = 4) -> tuple[Arena, Capturer]:
    """Return the arena and capturer of host s1h0, which captures all it has."""
    mesh = make_mesh()
    layout = layout_of(state, mesh, hosts_of(mesh), elastic_axis="data")
    arena = Arena.create("job", HOSTS[1], root=root)
    selection, own = captures(layout, replicas)[HOSTS[1]], device_ids_of(mesh, HOSTS[1])
    capturer = Capturer(arena, layout, HOSTS[1], selection, device_ids=own)
    arena.reserve(capturer.slot_bytes)
    return arena, capturer


@pytest.mark.parametrize("num_slices", [4, 3, 2, 1])
def test_state_restored_on_fewer_slices_equals_the_state_captured(root: Path, num_slices: int) -> None:
    state = every_kind_of_leaf(make_mesh())
    with captured(root, state, make_mesh()) as arenas:
        source = source_of(arenas)
        restored = restore(target_of(state, make_mesh(num_slices)), source)
        source.close()
    assert_same(restored, state)
    assert restored["float32"].sharding.mesh.devices.size == 2 * num_slices


def test_state_survives_the_loss_of_any_slice_with_two_replicas(root: Path) -> None:
    mesh = make_mesh()
    state = {
        "replicated": put(mesh, np.arange(8.0)),
        "model": put(mesh, np.arange(32.0).reshape(4, 8), None, "model"),
    }
    with captured(root, state, mesh, replicas=2) as arenas:
        for lost in range(4):
            source = source_of([arena for arena in arenas if arena.host != HOSTS[lost]])
            assert_same(restore(target_of(state, make_mesh(3)), source), state)
            source.close()


def test_device_checksums_of_the_restored_state_are_those_captured(root: Path) -> None:
    mesh = make_mesh()
    state = every_kind_of_leaf(mesh)
    on_device = {(path, box): value for (path, box, _), value in device_checksums(state).items()}
    with captured(root, state, mesh) as arenas:
        for arena in arenas:
            (manifest,) = arena.manifests().complete
            for holding in manifest.holdings():
                assert on_device.get((holding.path, holding.box), holding.checksum) == holding.checksum
        source = source_of(arenas)
        restored = restore(target_of(state, mesh), source)
        source.close()
    assert device_checksums(restored) == device_checksums(state)
    assert len({path for path, _, _ in device_checksums(state)}) == 15


def test_array_without_a_chosen_device_stays_usable_with_arrays_on_a_mesh(root: Path) -> None:
    mesh = make_mesh()
    state = {"count": jnp.int32(5), "key": jax.random.key(1), "w": put(mesh, np.ones(8, np.float32), "data")}
    with captured(root, state, mesh) as arenas:
        source = source_of(arenas)
        for target in (state, target_of(state), target_of(state, make_mesh(2))):
            restored = restore(target, source)
            assert_same(restored, state)
            noise = jax.jit(lambda tree: tree["w"] * tree["count"] + jax.random.normal(tree["key"], (8,)))
            assert np.isfinite(noise(restored)).all()
        source.close()


@pytest.mark.filterwarnings("error::UserWarning")
def test_donation_stays_on_after_capture(root: Path) -> None:
    mesh = make_mesh()
    state = {key: value for key, value in every_kind_of_leaf(mesh).items() if isinstance(value, jax.Array)}
    arena, capturer = one_host(root, state)
    step_function = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf, tree), donate_argnums=0)
    plain = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
    for step in range(3):
        addresses = addresses_of(state["float32"])
        capturer.capture(state, step=step, generation=1, position=0)
        old, state = state, step_function(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        old_leaf = state["float32"]
        state["float32"] = plain(old_leaf)
        assert old_leaf.is_deleted()
        assert addresses_of(state["float32"]) == addresses  # used again, not just marked deleted
    arena.unlink()


def test_restored_arrays_do_not_alias_the_arena(root: Path) -> None:
    mesh = make_mesh()
    state = {"w": put(mesh, np.arange(64.0, dtype=np.float32).reshape(8, 8))}
    arena, capturer = one_host(root, state)
    capturer.capture(state, step=1, generation=1, position=0)
    source = arena.find_shards(1)
    restored = restore(target_of(state, mesh), source)
    source.close()
    zeros = {"w": put(mesh, np.zeros((8, 8), np.float32))}
    for step in (2, 3):
        capturer.capture(zeros, step=step, generation=1, position=0)
    assert_same(restored, state)
    arena.unlink()


def test_capture_reads_arrays_that_are_not_row_major(root: Path) -> None:
    mesh = make_mesh()
    value = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    state = {"w": put(mesh, value)}
    arena, capturer = one_host(root, state)
    capturer.capture(state, step=1, generation=1, position=0)
    transposed = Format(DeviceLayout((1, 0)), state["w"].sharding)
    turned: Any = jax.jit(lambda leaf: leaf + 1, out_shardings=transposed)(state["w"])
    state = {"w": turned}
    assert turned.format.layout.major_to_minor == (1, 0)
    capturer.capture(state, step=2, generation=1, position=0)
    source = arena.find_shards(2)
    assert source.read("['w']", ((0, 4), (0, 8))).tobytes() == (value + 1).tobytes()
    source.close()
    donating = jax.jit(lambda leaf: leaf + 1, donate_argnums=0, out_shardings=transposed)
    before = addresses_of(turned)
    assert addresses_of(donating(turned)) == before
    arena.unlink()


def test_capture_takes_each_hosts_own_copy_of_a_replicated_array(root: Path) -> None:
    mesh = make_mesh()
    sharding = NamedSharding(mesh, PartitionSpec())
    copies = [
        jax.device_put(np.full(4, device.id, np.float32), device) for device in mesh.devices.flat
    ]  # as after a silent corruption
    state = {"w": jax.make_array_from_single_device_arrays((4,), sharding, copies)}
    arena, capturer = one_host(root, state)
    capturer.capture(state, step=1, generation=1, position=0)
    source = arena.find_shards(1)
    assert source.read("['w']", ((0, 4),)).view(np.float32)[0] == 2  # the first device of s1h0
    source.close()
    arena.unlink()


def test_capture_refuses_a_state_that_left_the_layout(root: Path) -> None:
    mesh = make_mesh()
    state = {"w": put(mesh, np.zeros((8, 8), np.float32), "data"), "n": 1}
    arena, capturer = one_host(root, state)
    capturer.capture(state, step=1, generation=1, position=0)
    wrong = [
        (
            {**state, "w": put(mesh, np.zeros((8, 8), np.float32), None, "data")},
            r"no device of s1h0 has \['w'\]",
        ),
        ({**state, "w": put(mesh, np.zeros((8, 4), np.float32), "data")}, r"\['w'\] is float32\(8, 4\)"),
        ({**state, "w": put(mesh, np.zeros((8, 8), np.int8), "data")}, r"\['w'\] is int8\(8, 8\)"),
        ({**state, "n": 1.5}, r"\['n'\] is (now )?float64"),
        ({"w": state["w"]}, r"differ in \['n'\]"),
    ]
    for other, message in wrong:
        with pytest.raises(UsageError, match=message):
            capturer.capture(other, step=2, generation=1, position=0)
    assert [manifest.step for manifest in arena.manifests().complete] == [1]
    capturer.capture({**state, "n": 2}, step=2, generation=1, position=0)
    assert [manifest.step for manifest in arena.manifests().complete] == [2, 1]
    arena.unlink()


def test_missing_and_damaged_shards_name_array_and_box(root: Path) -> None:
    mesh = make_mesh()
    state = {"w": put(mesh, np.arange(64.0, dtype=np.float32).reshape(8, 8), "data")}
    with captured(root, state, mesh, replicas=1) as arenas:
        source = source_of(arenas[:3])
        with pytest.raises(MissingShardError, match=r"\['w'\]\", box \[6:8, 0:8\]"):
            restore(target_of(state, mesh), source)
        source.close()
        path = next(path for path in arenas[3].slot_files() if path.exists())
        flip(path, path.read_bytes().index(np.arange(48.0, 64.0, dtype=np.float32).tobytes()))
        source = source_of(arenas)
        with pytest.raises(MissingShardError, match=r"box \[6:8, 0:8\]"):
            restore(target_of(state, mesh), source)
        assert len(source.rejected) == 1
        source.close()


def test_restore_into_another_shape_or_dtype_names_the_leaf(root: Path) -> None:
    mesh = make_mesh()
    state = {"w": put(mesh, np.zeros((8, 8), np.float32))}
    with captured(root, state, mesh) as arenas:
        source = source_of(arenas)
        for shape, dtype in (((8, 4), jnp.float32), ((8, 8), jnp.bfloat16)):
            target = {"w": jax.ShapeDtypeStruct(shape, dtype, sharding=state["w"].sharding)}
            with pytest.raises(
                UsageError, match=r"leaf \['w'\] is .* the snapshot of step 1 has float32\(8, 8\)"
            ):
                restore(target, source)
        with pytest.raises(UsageError, match=r"has no leaf \['extra'\]: it is of another state"):
            restore({"w": state["w"], "extra": state["w"]}, source)
        with pytest.raises(UsageError, match=r"leaves that the state has not, among them \['w'\]"):
            check_complete({"extra": state["w"]}, source)
        source.close()


def test_leaf_that_cannot_be_stored_is_named() -> None:
    mesh = make_mesh()
    for bad in ("text", np.array([object()])):
        with pytest.raises(UsageError, match=r"leaf \['name'\] is a"):
            layout_of({"name": bad}, mesh, hosts_of(mesh))


def test_layout_boxes_are_those_of_jax() -> None:
    mesh = make_mesh()
    state = every_kind_of_leaf(mesh)
    layout = layout_of(state, mesh, hosts_of(mesh), elastic_axis="data")
    arrays = {array.path: array for array in layout.arrays}
    for path, leaf in zip(flatten(state).paths, flatten(state).leaves, strict=True):
        if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
            continue
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        slices = data.sharding.devices_indices_map(data.shape)
        for device, box in zip(mesh.devices.flat, layout.boxes(arrays[path]), strict=True):
            expected = tuple(
                part.indices(size)[:2] for part, size in zip(slices[device], data.shape, strict=True)
            )
            assert box == expected, path
