import math
from dataclasses import replace

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from reshard_strategies import PROPERTY, layout_pairs, meshes, num_parts, specs

from reshard.boxes import volume
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout, dim_edges, spec_from_partition


class StandInDevice:
    """Enough of a device for a mesh of any size: index maps need no more."""

    platform = device_kind = "cpu"
    process_index = 0

    def __init__(self, device_id):
        self.id = device_id


def hosts(*slice_indices, per_slice=1):
    return tuple(HostId(index, host) for index in slice_indices for host in range(per_slice))


def array(shape, spec=(), path="w", itemsize=4, padded=False):
    return ArrayLayout(path=path, shape=shape, dtype="float32", itemsize=itemsize, spec=spec, padded=padded)


def mesh_of(sizes, owners):
    return MeshLayout(axis_names=tuple(sizes), axis_sizes=tuple(sizes.values()), hosts=owners)


def jax_boxes(mesh, spec, shape):
    devices = np.array([StandInDevice(index) for index in range(mesh.num_devices)], dtype=object)
    jax_mesh = Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names)
    index_map = NamedSharding(jax_mesh, PartitionSpec(*spec)).devices_indices_map(shape)
    ranges = [
        tuple(piece.indices(size)[:2] for piece, size in zip(index_map[device], shape, strict=True))
        for device in devices
    ]
    return tuple(ranges)


@st.composite
def sharded_arrays(draw):
    mesh = draw(meshes(max_devices=24))
    rank = draw(st.integers(0, 3))
    spec = draw(specs(mesh.axis_names, rank))
    return mesh, spec, tuple(num_parts(mesh, axes) * draw(st.integers(0, 3)) for axes in spec)


@PROPERTY
@given(sharded_arrays())
def test_layout_boxes_equal_those_of_named_sharding_for_any_mesh_and_spec(sharded):
    mesh, spec, shape = sharded
    layout = Layout(mesh=mesh, arrays=(array(shape, spec),))
    assert layout.boxes(layout.arrays[0]) == jax_boxes(mesh, spec, shape)


@PROPERTY
@given(sharded_arrays(), st.data())
def test_layout_refuses_a_shape_exactly_when_named_sharding_does(sharded, data):
    mesh, spec, _ = sharded
    shape = tuple(data.draw(st.integers(0, 9)) for _ in spec)
    try:
        expected = jax_boxes(mesh, spec, shape)
    except ValueError:
        with pytest.raises(UsageError, match="cannot split evenly"):
            Layout(mesh=mesh, arrays=(array(shape, spec),))
    else:
        layout = Layout(mesh=mesh, arrays=(array(shape, spec),))
        assert layout.boxes(layout.arrays[0]) == expected


def test_layout_boxes_equal_the_shards_of_a_real_array_on_eight_devices():
    if len(jax.devices()) < 8:
        pytest.skip("JAX was started with fewer than 8 devices")
    jax_mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    values = jax.device_put(
        np.arange(64).reshape(16, 4), NamedSharding(jax_mesh, PartitionSpec(("model", "data")))
    )
    layout = Layout(
        mesh=mesh_of({"data": 2, "model": 4}, hosts(0, 1, per_slice=4)),
        arrays=(array((16, 4), (("model", "data"),)),),
    )
    boxes = dict(zip(jax_mesh.devices.flat, layout.boxes(layout.arrays[0]), strict=True))
    for shard in values.addressable_shards:
        assert (
            tuple(piece.indices(size)[:2] for piece, size in zip(shard.index, (16, 4), strict=True))
            == (boxes[shard.device])
        )


@PROPERTY
@given(st.integers(0, 40), st.integers(1, 12))
def test_dim_edges_cut_a_padded_dim_into_equal_parts_and_leave_the_padding_out(size, num_parts):
    length = -(-size // num_parts)
    padded = np.pad(np.arange(size), (0, num_parts * length - size), constant_values=-1)
    edges = dim_edges(size, num_parts)
    assert edges.shape == (num_parts + 1,)
    for part, start, stop in zip(np.split(padded, num_parts), edges[:-1], edges[1:], strict=True):
        assert part[part >= 0].tolist() == list(range(start, stop))


@PROPERTY
@given(sharded_arrays())
def test_layout_boxes_are_the_same_padded_or_not_where_the_shape_divides(sharded):
    mesh, spec, shape = sharded
    layout = Layout(mesh=mesh, arrays=(array(shape, spec), array(shape, spec, path="p", padded=True)))
    plain, padded = layout.arrays
    assert layout.boxes(plain) == layout.boxes(padded)


@PROPERTY
@given(sharded_arrays(), st.data())
def test_padded_layout_boxes_are_those_of_named_sharding_of_the_padded_shape_clipped(sharded, data):
    mesh, spec, _ = sharded
    shape = tuple(data.draw(st.integers(0, 9)) for _ in spec)
    parts = [num_parts(mesh, axes) for axes in spec]
    padded_shape = tuple(-(-size // num) * num for size, num in zip(shape, parts, strict=True))
    layout = Layout(mesh=mesh, arrays=(array(shape, spec, padded=True),))
    assert layout.boxes(layout.arrays[0]) == tuple(
        tuple((min(start, size), min(stop, size)) for (start, stop), size in zip(box, shape, strict=True))
        for box in jax_boxes(mesh, spec, padded_shape)
    )


def test_padded_layout_gives_the_last_positions_short_and_empty_boxes():
    layout = Layout(
        mesh=mesh_of({"data": 4}, hosts(0, 1, 2, 3)), arrays=(array((5,), (("data",),), padded=True),)
    )
    assert layout.boxes(layout.arrays[0]) == (((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),))


@PROPERTY
@given(layout_pairs())
def test_layout_boxes_by_host_are_the_distinct_sorted_boxes_of_its_positions(pair):
    layout = pair[0]
    for arr in layout.arrays:
        by_host = layout.boxes_by_host(arr)
        assert list(by_host) == sorted(set(layout.mesh.hosts))
        for host, boxes in by_host.items():
            owned = {
                box for owner, box in zip(layout.mesh.hosts, layout.boxes(arr), strict=True) if owner == host
            }
            assert list(boxes) == sorted(owned)


@PROPERTY
@given(layout_pairs())
def test_layout_reads_back_equal_from_json_and_msgpack(pair):
    layout = pair[0]
    assert msgspec.json.decode(msgspec.json.encode(layout), type=Layout) == layout
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout) == layout


def test_array_layout_written_before_padding_was_known_reads_as_not_padded():
    text = '{"path": "w", "shape": [4], "dtype": "float32", "itemsize": 4, "spec": [["data"]]}'
    assert msgspec.json.decode(text, type=ArrayLayout) == array((4,), (("data",),))


def test_layout_refuses_bad_values_when_read_from_json():
    text = '{"axis_names": ["a"], "axis_sizes": [2], "hosts": [{"slice_index": 0, "host_index": 0}]}'
    with pytest.raises(UsageError, match="has 2 positions, got 1 hosts"):
        msgspec.json.decode(text, type=MeshLayout)


def elastic_layout(sizes=None, shape=(12, 8), spec=(("data",), ("model",)), slices=(0, 1, 2), per_slice=2):
    sizes = sizes or {"data": 3, "model": 2}
    return Layout(
        mesh=mesh_of(sizes, hosts(*slices, per_slice=per_slice)),
        arrays=(array(shape, spec),),
        elastic_axis="data",
    )


def test_layout_resized_shrinks_the_elastic_axis_and_keeps_the_others():
    small = elastic_layout().resized(hosts(0, 2, per_slice=2), 1)
    assert small.mesh.sizes() == {"data": 2, "model": 2}
    assert small.mesh.hosts == hosts(0, 2, per_slice=2)
    assert small.boxes(small.arrays[0]) == (
        ((0, 6), (0, 4)),
        ((0, 6), (4, 8)),
        ((6, 12), (0, 4)),
        ((6, 12), (4, 8)),
    )


def test_layout_resized_grows_back_to_an_equal_layout():
    layout = elastic_layout()
    small = layout.resized(hosts(0, 2, per_slice=2), 1)
    assert small != layout
    assert small.resized(hosts(0, 1, 2, per_slice=2), 1) == layout


def test_layout_resized_gives_the_same_boxes_whichever_slice_was_lost():
    layout = elastic_layout()
    results = [layout.resized(hosts(*alive, per_slice=2), 1) for alive in [(0, 1), (0, 2), (1, 2)]]
    assert len({result.boxes(result.arrays[0]) for result in results}) == 1


def test_layout_resized_puts_hosts_in_index_order_whatever_the_order_given():
    layout = elastic_layout()
    alive = hosts(0, 2, per_slice=2)
    assert layout.resized(reversed(alive), 1) == layout.resized(alive, 1)


def test_layout_resized_keeps_other_axes_inside_a_slice_when_the_elastic_axis_is_not_first():
    layout = Layout(
        mesh=mesh_of({"model": 2, "data": 3}, (*hosts(0, 1, 2), *hosts(0, 1, 2))),
        arrays=(array((12, 8), (("data",), ("model",))),),
        elastic_axis="data",
    )
    small = layout.resized(hosts(0, 2), 2)
    assert small.mesh.axis_sizes == (2, 2)
    assert small.mesh.hosts == (*hosts(0, 2), *hosts(0, 2))


def test_layout_resized_moves_to_as_many_other_hosts_when_no_axis_is_elastic():
    layout = Layout(mesh=mesh_of({"model": 2}, hosts(0, 1)), arrays=(array((4,), (("model",),)),))
    assert layout.resized(hosts(3, 5), 1).mesh.hosts == hosts(3, 5)
    with pytest.raises(UsageError, match="no axis spans slices"):
        layout.resized(hosts(3), 1)


@pytest.mark.parametrize(
    ("alive", "devices_per_host", "message"),
    [
        (hosts(0, 1, 2), 1, r"3 devices are not a multiple of 2 \(model=2\), so axis 'data' has no size"),
        (hosts(0), 1, "1 devices are not a multiple of 2"),
        ((), 1, "cannot lay out on 0 hosts"),
        (hosts(0), 0, "cannot lay out on 1 hosts of 0 devices"),
        (hosts(0, 0), 1, "hosts repeat: s0h0, s0h0"),
    ],
)
def test_layout_resized_refuses_hosts_whose_devices_do_not_factor(alive, devices_per_host, message):
    with pytest.raises(UsageError, match=message):
        elastic_layout().resized(alive, devices_per_host)


def test_layout_resized_refuses_a_dim_that_no_longer_divides_and_names_it():
    layout = elastic_layout(shape=(9, 8))
    with pytest.raises(
        UsageError, match="dim 0 of 'w' has size 9, which axes data cannot split evenly into 2"
    ) as info:
        layout.resized(hosts(0, 1, per_slice=2), 1)
    assert (info.value.path, info.value.dim, info.value.num_parts) == ("w", 0, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mesh_of({"a": 2}, hosts(0)), "a mesh of a=2 has 2 positions, got 1 hosts"),
        (lambda: mesh_of({"a": 0}, ()), "at least 1"),
        (lambda: MeshLayout(axis_names=("a",), axis_sizes=(), hosts=()), "1 mesh axes but 0 sizes"),
        (lambda: MeshLayout(axis_names=("a", "a"), axis_sizes=(1, 1), hosts=hosts(0)), "names repeat"),
        (lambda: array((-1,)), "negative dim"),
        (lambda: array((1,), itemsize=0), "not positive"),
        (lambda: array((1,), ((), ())), "has 1 dims, its spec"),
        (lambda: array((4, 4), (("a",), ("a",))), "uses a mesh axis twice"),
        (
            lambda: Layout(mesh=mesh_of({"a": 1}, hosts(0)), arrays=(array((4,), (("b",),)),)),
            "no axis 'b', only a",
        ),
        (
            lambda: Layout(mesh=mesh_of({"a": 1}, hosts(0)), arrays=(array(()), array(()))),
            "'w' is listed twice",
        ),
        (lambda: Layout(mesh=mesh_of({"a": 1}, hosts(0)), arrays=(), elastic_axis="b"), "no axis 'b'"),
    ],
)
def test_layout_refuses_contradictions_on_construction(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_array_layout_completes_a_short_spec_so_that_equal_arrays_are_equal():
    assert array((4, 4), (("a",),)) == array((4, 4), (("a",), ()))
    assert array((4, 4)).spec == ((), ())


def test_array_layout_counts_bytes_of_the_whole_and_of_a_box():
    arr = array((6, 4), itemsize=2)
    assert arr.nbytes == 48
    assert arr.box_nbytes(((0, 3), (1, 3))) == 12
    assert array((), itemsize=2).nbytes == 2


def test_mesh_without_axes_has_one_position_that_holds_everything():
    layout = Layout(mesh=mesh_of({}, hosts(7)), arrays=(array((3, 2)), array((), path="step")))
    assert [layout.boxes(arr) for arr in layout.arrays] == [(((0, 3), (0, 2)),), ((),)]


def test_mesh_layouts_are_equal_by_value_and_usable_as_keys():
    a, b = (mesh_of({"data": 3}, hosts(0, 1, 2)) for _ in range(2))
    other = mesh_of({"data": 3}, hosts(0, 5, 2))
    assert {a: 1, other: 2}[b] == 1


def test_spec_from_partition_reads_every_form_of_entry():
    assert spec_from_partition(PartitionSpec(None, "a", ("b", "c"))) == ((), ("a",), ("b", "c"))
    with pytest.raises(UsageError, match="does not name mesh axes"):
        spec_from_partition([PartitionSpec.UNCONSTRAINED])


def test_layout_boxes_stay_cheap_at_thousands_of_devices():
    sizes = {"data": 64, "fsdp": 8, "model": 16}
    owners = tuple(HostId(index // 128, index % 128 // 4) for index in range(math.prod(sizes.values())))
    layout = Layout(mesh=mesh_of(sizes, owners), arrays=(array((4096, 512), (("data", "fsdp"), ("model",))),))
    boxes = layout.boxes(layout.arrays[0])
    assert len(boxes) == 8192
    assert sum(map(volume, boxes)) == 4096 * 512
    assert layout.boxes(array((4096, 512), (("data", "fsdp"), ("model",)), path="other")) is boxes


@pytest.mark.parametrize("shape", [(2**62,), (2**21,) * 3, (10**30,), (0, 10**30)])
def test_array_layout_refuses_more_bytes_than_can_be_counted(shape):
    with pytest.raises(UsageError, match=r"'w' of shape .* more bytes than can be counted"):
        ArrayLayout(path="w", shape=shape, dtype="float32", itemsize=4)


def test_layout_refuses_more_bytes_on_all_devices_than_can_be_counted():
    hosts = tuple(map(HostId, range(4)))
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(4,), hosts=hosts)
    array = ArrayLayout(path="w", shape=(2**60,), dtype="float32", itemsize=4, spec=(("data",),))
    Layout(mesh=mesh, arrays=(array,))
    with pytest.raises(UsageError, match="4 devices of 4,611,686,018,427,387,904 bytes of state each"):
        Layout(mesh=mesh, arrays=(replace(array, spec=()),))
