import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, meshes, num_parts, specs

from reshard.errors import UsageError
from reshard.fits import (
    Misfit,
    broken_slices,
    fitted_spec,
    hosts_of_slices,
    misfits,
    part_shape,
    spanning_axes,
)
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout


def slices_mesh(names: tuple[str, ...], sizes: tuple[int, ...], num_slices: int) -> MeshLayout:
    """One host a slice, its devices side by side."""
    per_slice = int(np.prod(sizes)) // num_slices
    hosts = tuple(HostId(index) for index in range(num_slices) for _ in range(per_slice))
    return MeshLayout(axis_names=names, axis_sizes=sizes, hosts=hosts)


@PROPERTY
@given(st.data(), meshes())
def test_fitted_spec_makes_every_shape_fit_and_changes_no_dim_that_fits(data, mesh):
    spec = data.draw(specs(mesh.axis_names, data.draw(st.integers(0, 3))))
    axis, sizes = data.draw(st.sampled_from(mesh.axis_names)), mesh.sizes()
    others = [tuple(name for name in axes if name != axis) for axes in spec]
    shape = tuple(num_parts(mesh, axes) * data.draw(st.integers(0, 5)) for axes in others)
    fitted = fitted_spec(shape, spec, sizes, axis)
    array = ArrayLayout(path="w", shape=shape, dtype="x", itemsize=1, spec=fitted)
    Layout(mesh=mesh, arrays=(array,))  # raises where it does not fit
    for size, old, new, without in zip(shape, spec, fitted, others, strict=True):
        assert new == (without if size % num_parts(mesh, old) else old)


def test_fitted_spec_refuses_a_dim_that_another_axis_does_not_divide():
    with pytest.raises(UsageError, match=r"dim 1 \(7\) does not divide into 2, over model=2"):
        fitted_spec((9, 7), (("data",), ("model",)), {"data": 2, "model": 2}, "data")


def test_misfits_name_dim_size_and_parts():
    found = misfits((4096, 50257, 6), (("data", "model"), ("data",)), {"data": 3, "model": 4})
    assert found == (
        Misfit(dim=0, size=4096, num_parts=12, axes=("data", "model")),
        Misfit(dim=1, size=50257, num_parts=3, axes=("data",)),
    )
    assert str(found[1]) == "dim 1 (50,257) does not divide into 3"


def test_misfits_refuse_an_axis_the_mesh_has_not_and_a_spec_that_is_too_long():
    with pytest.raises(UsageError, match="no axis 'stage', only data"):
        misfits((4,), (("stage",),), {"data": 2})
    with pytest.raises(UsageError, match="for 2 dims"):
        misfits((4,), ((), ()), {"data": 2})


@PROPERTY
@given(st.data(), meshes())
def test_part_shape_is_that_of_the_largest_box(data, mesh):
    spec = data.draw(specs(mesh.axis_names, 2))
    shape = (data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9)))
    array = ArrayLayout(path="w", shape=shape, dtype="x", itemsize=1, spec=spec, padded=True)
    boxes = np.array(Layout(mesh=mesh, arrays=(array,)).boxes(array))
    expected = (boxes[:, :, 1] - boxes[:, :, 0]).max(axis=0)
    assert part_shape(shape, spec, mesh.sizes()) == tuple(expected.tolist())


@PROPERTY
@given(meshes())
def test_spanning_axes_are_those_along_which_the_slice_changes(mesh):
    grid = np.array([host.slice_index for host in mesh.hosts]).reshape(mesh.axis_sizes)
    expected = [
        name for dim, name in enumerate(mesh.axis_names) if (grid != np.take(grid, [0], axis=dim)).any()
    ]
    assert list(spanning_axes(mesh)) == expected


def test_spanning_axes_of_replicas_of_a_pipeline_are_both():
    assert spanning_axes(slices_mesh(("data", "stage", "model"), (2, 2, 4), 4)) == ("data", "stage")
    assert spanning_axes(slices_mesh(("data", "model"), (4, 2), 4)) == ("data",)


def test_broken_slices_are_what_is_left_of_a_place_on_the_axis():
    mesh = slices_mesh(("data", "stage"), (2, 2), 4)  # replica 0 on slices 0 and 1, replica 1 on 2 and 3
    assert broken_slices(mesh, "data", {1, 2, 3}) == {0, 1}
    assert broken_slices(mesh, "stage", {1, 2, 3}) == {0, 2}
    assert broken_slices(mesh, "data", {0, 1, 2, 3}) == set()


def test_hosts_of_slices_are_sorted_and_each_once():
    hosts = [HostId(2, 1), HostId(0), HostId(2), HostId(2, 1)]
    assert hosts_of_slices(hosts) == {0: (HostId(0),), 2: (HostId(2), HostId(2, 1))}
