"""Specs read from shardings: what a layout says each device has is what JAX says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax_helpers import captured, hosts_of, make_mesh, put, source_of

from reshard.boxes import Box
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.restore import restore
from snapshot.shardings import box_of
from snapshot.tree import layout_of, target_of

AXES = ("data", "fsdp", "expert", "model")
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


class StandInDevice:
    """Enough of a device for a mesh of any size: index maps need no more."""

    platform = device_kind = "cpu"
    process_index = 0

    def __init__(self, device_id: int) -> None:
        self.id = device_id


def struct(shape: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


def layout_on(mesh: Mesh, leaf: Any, elastic_axis: str | None = None) -> Layout:
    hosts = {device.id: HostId(index // 2) for index, device in enumerate(mesh.devices.flat)}
    return layout_of({"w": leaf}, mesh, hosts, elastic_axis=elastic_axis)


def boxes_on(mesh: Mesh, leaf: Any) -> tuple[Box, ...]:
    layout = layout_on(mesh, leaf)
    return layout.boxes(layout.arrays[0])


def spec_on(mesh: Mesh, leaf: Any) -> tuple[tuple[str, ...], ...]:
    return layout_on(mesh, leaf).arrays[0].spec


def jax_boxes(mesh: Mesh, shape: tuple[int, ...], sharding: Any) -> tuple[Box, ...]:
    """What each device of the mesh has, as JAX says."""
    index_map = sharding.devices_indices_map(shape)
    return tuple(box_of(index_map[device], shape) for device in mesh.devices.flat)


@st.composite
def factored(draw: st.DrawFn, num_devices: int, max_axes: int = 4) -> tuple[int, ...]:
    """Sizes of 1 to 4 axes that make so many devices."""
    sizes = []
    for _ in range(draw(st.integers(1, max_axes)) - 1):
        divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        num_devices //= sizes[-1]
    return tuple(draw(st.permutations([*sizes, num_devices])))


@st.composite
def partitions(draw: st.DrawFn, mesh: Mesh, max_rank: int = 3) -> tuple[PartitionSpec, tuple[int, ...]]:
    """A spec on the mesh, and a shape that it divides; axes in any order, some sizes 0."""
    dims: list[list[str]] = [[] for _ in range(draw(st.integers(0, max_rank)))]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(-1, len(dims) - 1))
        if dim >= 0:
            dims[dim].append(axis)
    parts = [math.prod(mesh.shape[axis] for axis in axes) for axes in dims]
    shape = tuple(num * draw(st.sampled_from([0, 1, 1, 2, 3])) for num in parts)
    entries: list[Any] = [tuple(axes) or None for axes in dims]
    while entries and entries[-1] is None and draw(st.booleans()):
        entries.pop()
    return PartitionSpec(*entries), shape


def mesh_over(devices: Any, sizes: tuple[int, ...], names: tuple[str, ...] = AXES) -> Mesh:
    return Mesh(np.array(devices, dtype=object).reshape(sizes), names[: len(sizes)])


@given(data=st.data())
def test_boxes_equal_the_index_map_of_any_named_sharding_on_real_devices(data: st.DataObject) -> None:
    num_devices = data.draw(st.integers(1, len(jax.devices())))
    devices = data.draw(st.permutations(jax.devices()))[:num_devices]
    names = tuple(data.draw(st.permutations(AXES)))
    mesh = mesh_over(devices, data.draw(factored(num_devices)), names)
    spec, shape = data.draw(partitions(mesh))
    sharding = NamedSharding(mesh, spec)
    assert boxes_on(mesh, struct(shape, sharding)) == jax_boxes(mesh, shape, sharding)


@given(data=st.data())
def test_boxes_equal_the_index_map_on_meshes_of_up_to_thousands_of_devices(data: st.DataObject) -> None:
    num_devices = data.draw(st.sampled_from([12, 30, 64, 210, 1024, 2310, 4096]))
    mesh = mesh_over(list(map(StandInDevice, range(num_devices))), data.draw(factored(num_devices)))
    spec, shape = data.draw(partitions(mesh))
    sharding = NamedSharding(mesh, spec)
    assert boxes_on(mesh, struct(shape, sharding)) == jax_boxes(mesh, shape, sharding)


def every_spec(axis_names: tuple[str, ...], rank: int) -> Iterator[PartitionSpec]:
    """All specs there are: each axis on one dim or none, in every order."""
    for places in itertools.product(range(rank + 1), repeat=len(axis_names)):
        by_dim = [[a for a, place in zip(axis_names, places, strict=True) if place == d] for d in range(rank)]
        for dims in itertools.product(*(itertools.permutations(axes) for axes in by_dim)):
            yield PartitionSpec(*dims)


def divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    entries = [() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in sharding.spec]
    parts = [math.prod(sharding.mesh.shape[axis] for axis in axes) for axes in entries]
    return all(size % num == 0 for size, num in zip(shape, parts, strict=True))


@given(data=st.data())
def test_sharding_of_another_mesh_is_read_exactly_when_some_spec_of_this_one_says_the_same(
    data: st.DataObject,
) -> None:
    num_devices = data.draw(st.sampled_from([2, 4, 6, 8]))
    devices = jax.devices()[:num_devices]
    mesh = mesh_over(devices, data.draw(factored(num_devices, 3)), AXES)
    order = data.draw(st.one_of(st.just(devices), st.permutations(devices)))
    if data.draw(st.booleans()):
        axes = data.draw(st.permutations(range(mesh.devices.ndim)))
        order = list(mesh.devices.transpose(axes).flat)
    other = mesh_over(order, data.draw(factored(num_devices, 3)), ("x", "y", "z"))
    spec, shape = data.draw(partitions(other, 2))
    sharding = NamedSharding(other, spec)
    expected = jax_boxes(mesh, shape, sharding)
    candidates = [NamedSharding(mesh, every) for every in every_spec(mesh.axis_names, len(shape))]
    if any(jax_boxes(mesh, shape, same) == expected for same in candidates if divides(same, shape)):
        assert boxes_on(mesh, struct(shape, sharding)) == expected
    else:
        with pytest.raises(UsageError, match="no partition spec of the mesh"):
            boxes_on(mesh, struct(shape, sharding))


ROWS = (16, 8)


@pytest.mark.parametrize(
    ("sizes", "names", "spec", "expected"),
    [
        ((8,), ("all",), PartitionSpec("all"), (("data", "model"), ())),
        ((8,), ("all",), PartitionSpec(None, "all"), ((), ("data", "model"))),
        ((2, 2, 2), ("a", "b", "c"), PartitionSpec(("a", "b"), "c"), (("data",), ("model",))),
        ((2, 2, 2), ("a", "b", "c"), PartitionSpec("c"), (("model",), ())),
        ((4, 2), ("model", "data"), PartitionSpec("model"), (("data",), ())),
        ((4, 2), ("x", "y"), PartitionSpec(("y", "x")), (("model", "data"), ())),
        ((4, 2, 1), ("x", "y", "z"), PartitionSpec("z", "x"), ((), ("data",))),
    ],
)
def test_named_sharding_of_the_same_devices_under_other_names_is_read_in_the_names_of_the_mesh(
    sizes: tuple[int, ...], names: tuple[str, ...], spec: PartitionSpec, expected: Any
) -> None:
    other = Mesh(np.array(jax.devices()).reshape(sizes), names)
    leaf = jax.device_put(np.zeros(ROWS, np.float32), NamedSharding(other, spec))
    assert spec_on(make_mesh(), leaf) == expected
    assert boxes_on(make_mesh(), leaf) == jax_boxes(make_mesh(), ROWS, leaf.sharding)


@pytest.mark.parametrize(
    ("sizes", "devices", "spec"),
    [
        ((2, 4), slice(None), PartitionSpec("x")),  # two devices of a row of four: no axis of 4 × 2 does that
        ((4, 2), slice(None, None, -1), PartitionSpec("x")),
    ],
)
def test_sharding_that_no_spec_of_the_mesh_describes_is_refused_with_the_leafs_name(
    sizes: tuple[int, ...], devices: slice, spec: PartitionSpec
) -> None:
    other = Mesh(np.array(jax.devices())[devices].reshape(sizes), ("x", "y"))
    leaf = jax.device_put(np.zeros(ROWS, np.float32), NamedSharding(other, spec))
    with pytest.raises(
        UsageError, match=r"leaf \['w'\] has sharding .*no partition spec of the mesh"
    ) as info:
        layout_on(make_mesh(), leaf)
    assert "out_shardings" in (info.value.remedy or "")


def test_output_of_pmap_is_read_as_partitioned_over_all_axes() -> None:
    leaf = jax.pmap(lambda row: row + 1)(np.zeros((8, 3), np.float32))
    assert spec_on(make_mesh(), leaf) == (("data", "model"), ())


def test_gspmd_sharding_is_read_by_its_index_map() -> None:
    private = pytest.importorskip("jax._src.sharding_impls", reason="this JAX keeps it elsewhere")
    client = pytest.importorskip("jax._src.lib").xla_client
    tiles = client.OpSharding()
    tiles.type = client.OpSharding.Type.OTHER
    tiles.tile_assignment_dimensions = [4, 2]
    tiles.tile_assignment_devices = [0, 2, 4, 6, 1, 3, 5, 7]
    sharding = private.GSPMDSharding(tuple(jax.devices()), tiles)
    with pytest.raises(UsageError, match="no partition spec"):
        layout_on(make_mesh(), struct(ROWS, sharding))
    tiles.tile_assignment_dimensions = [2, 4]
    leaf = jax.device_put(np.zeros(ROWS, np.float32), private.GSPMDSharding(tuple(jax.devices()), tiles))
    assert spec_on(make_mesh(), leaf) == (("model",), ("data",))


def test_leaf_that_is_whole_on_each_of_its_devices_counts_as_replicated_wherever_it_is() -> None:
    mesh = make_mesh()
    corner = Mesh(mesh.devices[:2], mesh.axis_names)
    places = [
        jax.sharding.SingleDeviceSharding(mesh.devices[2, 1]),
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(corner, PartitionSpec()),
        NamedSharding(Mesh(mesh.devices[::-1], ("x", "y")), PartitionSpec(None, None)),
    ]
    for sharding in places:
        leaf = jax.device_put(np.zeros(ROWS, np.float32), sharding)
        assert spec_on(mesh, leaf) == ((), ())
    assert spec_on(mesh, np.zeros(ROWS)) == ((), ())


def test_axis_of_size_one_stays_in_the_spec_so_that_the_layout_can_grow_along_it() -> None:
    mesh = make_mesh(1)
    layout = layout_on(mesh, put(mesh, np.zeros(ROWS, np.float32), "data", "model"), elastic_axis="data")
    assert layout.arrays[0].spec == (("data",), ("model",))
    grown = layout.resized([HostId(0), HostId(1)], 2)
    assert grown.boxes(grown.arrays[0])[0] == ((0, 8), (0, 4))
    alone = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    assert spec_on(alone, put(alone, np.zeros(ROWS, np.float32), "data")) == (("data",), ())


def test_leaf_partitioned_over_some_of_the_devices_is_refused() -> None:
    mesh = make_mesh()
    leaf = put(Mesh(mesh.devices[:2], mesh.axis_names), np.zeros(ROWS, np.float32), "data")
    with pytest.raises(UsageError, match=r"leaf \['w'\] is partitioned over 4 devices, not over those of"):
        layout_on(mesh, leaf)


def test_abstract_mesh_of_the_same_axes_stands_for_the_mesh() -> None:
    mesh = make_mesh()
    spec = PartitionSpec("model", "data")
    described = struct(ROWS, NamedSharding(AbstractMesh((4, 2), ("data", "model")), spec))
    assert spec_on(mesh, described) == (("model",), ("data",))
    for sizes, names in (((2, 4), ("data", "model")), ((2, 4), ("model", "data"))):
        other = struct(ROWS, NamedSharding(AbstractMesh(sizes, names), spec))
        with pytest.raises(UsageError, match=r"leaf \['w'\] is laid out on the abstract mesh \{"):
            layout_on(mesh, other)


def test_shape_worked_out_on_explicit_axes_is_read_without_its_values() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        described = jax.eval_shape(lambda x: x.T, put(mesh, np.zeros(ROWS, np.float32), "data", "model"))
    assert isinstance(described.sharding.mesh, AbstractMesh)
    assert spec_on(mesh, described) == (("model",), ("data",))
    assert spec_on(make_mesh(), described) == (("model",), ("data",))


def test_unconstrained_dim_is_whole_in_an_array_and_refused_in_a_description() -> None:
    mesh = make_mesh()
    sharding = NamedSharding(mesh, PartitionSpec(UNCONSTRAINED, "model"))
    leaf = jax.make_array_from_callback(ROWS, sharding, lambda index: np.zeros(ROWS, np.float32)[index])
    assert spec_on(mesh, leaf) == ((), ("model",))
    assert boxes_on(mesh, leaf) == jax_boxes(mesh, ROWS, sharding)
    with pytest.raises(
        UsageError, match=r"leaf \['w'\] is described by .*which leaves a dim to the compiler"
    ):
        layout_on(mesh, struct(ROWS, sharding))


def test_unreduced_leaf_is_refused_and_a_reduced_one_is_replicated() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    unreduced = struct((16,), NamedSharding(mesh, PartitionSpec("data", unreduced={"model"})))
    with pytest.raises(UsageError, match=r"leaf \['w'\] is unreduced over model: each device has a term of"):
        layout_on(mesh, unreduced)
    reduced = NamedSharding(mesh, PartitionSpec("data", reduced={"model"}))
    assert spec_on(mesh, jax.device_put(np.zeros(16, np.float32), reduced)) == (("data",),)


def test_dim_that_does_not_divide_is_refused_by_name_as_jax_does() -> None:
    mesh = make_mesh()
    uneven = NamedSharding(mesh, PartitionSpec("data"))
    with pytest.raises(UsageError, match=r"dim 0 of \"\['w'\]\" has size 9, which axes data cannot split"):
        layout_on(mesh, struct((9, 2), uneven))
    other = NamedSharding(Mesh(mesh.devices, ("x", "y")), PartitionSpec("x"))
    with pytest.raises(UsageError, match=r"leaf \['w'\] cannot have its sharding: .* evenly divide"):
        layout_on(mesh, struct((9, 2), other))


def test_uneven_constraint_inside_a_jitted_function_leaves_what_comes_out_whole() -> None:
    mesh = make_mesh()
    uneven = NamedSharding(mesh, PartitionSpec("data"))
    leaf = jax.jit(lambda: jax.lax.with_sharding_constraint(jnp.arange(9), uneven))()
    assert spec_on(mesh, leaf) == ((),)
    assert boxes_on(mesh, leaf) == jax_boxes(mesh, (9,), leaf.sharding)


@pytest.mark.parametrize("memory_kind", ["pinned_host", "unpinned_host"])
def test_leaf_in_host_memory_has_the_spec_of_its_axes_and_returns_to_its_memory(
    root: Any, memory_kind: str
) -> None:
    mesh = make_mesh()
    sharding = NamedSharding(mesh, PartitionSpec("model", "data"), memory_kind=memory_kind)
    state = {"w": jax.device_put(np.arange(128, dtype=np.float32).reshape(ROWS), sharding)}
    assert spec_on(mesh, state["w"]) == (("model",), ("data",))
    with captured(root, state, mesh) as arenas:
        source = source_of(arenas)
        restored = restore(target_of(state), source)
        source.close()
    assert restored["w"].sharding == sharding
    assert np.array_equal(restored["w"], state["w"])


def test_leaf_of_another_mesh_is_captured_from_each_hosts_own_devices(root: Any) -> None:
    mesh = make_mesh()
    turned = Mesh(mesh.devices.T, ("x", "y"))
    values = np.arange(128, dtype=np.float32).reshape(ROWS)
    # Each device's copy says whose it is, as after a silent corruption.
    sharding = NamedSharding(turned, PartitionSpec(None, "y"))
    shards = [
        jax.device_put(values[index] + 1000 * device.id, device)
        for device, index in sharding.devices_indices_map(ROWS).items()
    ]
    state = {"w": jax.make_array_from_single_device_arrays(ROWS, sharding, shards)}
    layout = layout_of(state, mesh, hosts_of(mesh))
    assert layout.arrays[0].spec == ((), ("data",))
    with captured(root, state, mesh, replicas=1) as arenas:
        for arena, host_devices in zip(arenas, mesh.devices, strict=True):
            source = arena.find_shards(1)
            box = layout.boxes_by_host(layout.arrays[0])[arena.host][0]
            kept = source.read("['w']", box).view(np.float32)
            source.close()
            expected = values[:, slice(*box[1])]
            assert any(np.array_equal(kept, expected + 1000 * device.id) for device in host_devices)
