"""Clusters and states whose number of slices changes, for the tests of the layout choice."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from reshard.choice import LayoutChoice, choose_layout
from reshard.holdings import Holding, layout_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout


def cluster(axes: dict[str, int], num_slices: int, hosts_per_slice: int = 2) -> MeshLayout:
    """A mesh over slices of equal size, devices in order; the first axes are outermost."""
    per_host = math.prod(axes.values()) // (num_slices * hosts_per_slice)
    hosts = [
        HostId(slice_index, host)
        for slice_index in range(num_slices)
        for host in range(hosts_per_slice)
        for _ in range(per_host)
    ]
    return MeshLayout(axis_names=tuple(axes), axis_sizes=tuple(axes.values()), hosts=tuple(hosts))


def array(path: str, shape: tuple[int, ...], *spec: str, padded: bool = False) -> ArrayLayout:
    """An array of float32; each of `spec` names the axis of a dim, "" for none."""
    axes = tuple((axis,) if axis else () for axis in spec)
    return ArrayLayout(path=path, shape=shape, dtype="float32", itemsize=4, spec=axes, padded=padded)


def survivors(mesh: MeshLayout, *lost: int) -> list[HostId]:
    """The hosts that are not of the lost slices."""
    return [host for host in mesh.distinct_hosts() if host.slice_index not in lost]


def choose(mesh: MeshLayout, arrays: list[ArrayLayout], lost: tuple[int, ...], **settings) -> LayoutChoice:
    """The choice after the loss of these slices."""
    layout = Layout(mesh=mesh, arrays=tuple(arrays))
    per_host = mesh.num_devices // len(mesh.distinct_hosts())
    return choose_layout(layout, survivors(mesh, *lost), per_host, **settings)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Layout, list[HostId], int, list[Holding]]:
    """A layout with an elastic axis over slices, some of the hosts, devices a host, and holdings.

    What only lost slices had, another host has.
    """
    num_slices, per_slice = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4]))
    model = draw(st.sampled_from([size for size in (1, 2) if per_slice % size == 0]))
    hosts_per_slice = draw(st.sampled_from([count for count in (1, 2) if per_slice % count == 0]))
    mesh = cluster({"data": num_slices * per_slice // model, "model": model}, num_slices, hosts_per_slice)
    arrays = []
    for index in range(draw(st.integers(1, 4))):
        spec = draw(st.sampled_from([("data",), ("", "data"), ("data", "model"), ("model",), ()]))
        sizes = [mesh.axis_size(axis) if axis else 1 for axis in (*spec, "", "")[:2]]
        shape = tuple(size * draw(st.integers(0, 6)) for size in sizes)
        arrays.append(array(f"w{index}", shape, *spec))
    layout = Layout(mesh=mesh, arrays=tuple(arrays), elastic_axis="data")
    kept = draw(st.sets(st.sampled_from(range(num_slices)), min_size=1))
    hosts = [host for host in mesh.distinct_hosts() if host.slice_index in kept]
    hosts += [HostId(num_slices, host) for host in range(hosts_per_slice)] * draw(st.integers(0, 1))
    holdings = [
        h if h.host in hosts else replace(h, host=draw(st.sampled_from(hosts)), tier="peer")
        for h in layout_holdings(layout, step=7)
    ]
    return layout, draw(st.permutations(hosts)), per_slice // hosts_per_slice, holdings
