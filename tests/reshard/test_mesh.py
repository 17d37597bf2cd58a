import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, meshes

from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.mesh import MeshLayout


def mesh_of(**sizes):
    num_devices = int(np.prod(list(sizes.values()), dtype=int))
    return MeshLayout(
        axis_names=tuple(sizes), axis_sizes=tuple(sizes.values()), hosts=(HostId(0),) * num_devices
    )


@st.composite
def meshes_with_axes(draw):
    mesh = draw(meshes(max_devices=24))
    num_axes = draw(st.integers(0, len(mesh.axis_names)))
    return mesh, tuple(draw(st.permutations(mesh.axis_names))[:num_axes])


@PROPERTY
@given(meshes())
def test_mesh_numbers_its_hosts_in_order_and_each_position_by_its_host(mesh):
    distinct = mesh.distinct_hosts()
    assert list(distinct) == sorted(set(mesh.hosts))
    assert [distinct[index] for index in mesh.host_index()] == list(mesh.hosts)
    with pytest.raises(ValueError, match="read-only"):
        mesh.host_index()[0] = 0


@PROPERTY
@given(meshes_with_axes())
def test_mesh_part_index_counts_the_first_named_axis_outermost(mesh_and_axes):
    mesh, axes = mesh_and_axes
    coordinates = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_sizes), -1)
    picked = [mesh.axis_names.index(axis) for axis in axes]
    sizes = [mesh.axis_sizes[index] for index in picked]
    expected = np.zeros(mesh.num_devices, int)
    if picked:
        expected = np.ravel_multi_index([coordinates[index] for index in picked], sizes)
    assert mesh.num_parts(axes) == np.prod(sizes, dtype=int)
    assert mesh.part_index(axes).tolist() == expected.tolist()


@PROPERTY
@given(meshes_with_axes())
def test_mesh_tells_the_axes_of_a_part_index_but_for_those_of_size_one(mesh_and_axes):
    mesh, axes = mesh_and_axes
    told = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    assert mesh.axes_of_parts(mesh.part_index(axes)) == told


@pytest.mark.parametrize(
    "parts",
    [
        [1, 1, 0, 0],  # counted backwards
        [0, 2, 1, 3][::-1],
        [0, 0, 2, 2],  # parts left out
        [0, 1, 1, 0],
        [0, 0, 0, 1],
    ],
)
def test_mesh_tells_no_axes_of_parts_that_none_make(parts):
    assert mesh_of(a=2, b=2).axes_of_parts(np.array(parts)) is None


def test_mesh_refuses_axes_that_it_does_not_have():
    with pytest.raises(UsageError, match="no axis 'c', only a, b"):
        mesh_of(a=2, b=2).part_index(("a", "c"))


def test_mesh_counts_its_slices_and_names_its_sizes():
    mesh = MeshLayout(axis_names=("a", "b"), axis_sizes=(3, 1), hosts=(HostId(4), HostId(0, 1), HostId(4, 2)))
    assert (mesh.num_slices, mesh.sizes()) == (2, {"a": 3, "b": 1})
