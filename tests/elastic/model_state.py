"""The state that is trained: three arrays, replicated over the slices, and what a host captures of it.

Where slices have several hosts, two of the arrays are in parts on the hosts of a slice.
"""

from __future__ import annotations

from functools import lru_cache

from elastic.events import SnapshotSummary
from elastic.members import host_of
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.redundancy import host_captures

PATHS = ("bias", "moments", "weights")

Content = tuple[tuple[int, int], ...]
"""What a state is made of: each step it contains with the generation that made it."""


@lru_cache
def layout_for(slices: tuple[int, ...], hosts_per_slice: int = 1) -> Layout:
    """The layout of the state on these slices, one device a host."""
    hosts = tuple(HostId(index, host) for index in slices for host in range(hosts_per_slice))
    names, sizes = ("data",), (len(slices),)
    if hosts_per_slice > 1:
        names, sizes = ("data", "model"), (len(slices), hosts_per_slice)
    mesh = MeshLayout(axis_names=names, axis_sizes=sizes, hosts=hosts)
    arrays = tuple(
        ArrayLayout(
            path=path,
            shape=(4 * hosts_per_slice,),
            dtype="float32",
            itemsize=4,
            spec=(("model",),) if hosts_per_slice > 1 and path != "bias" else ((),),
        )
        for path in PATHS
    )
    return Layout(mesh=mesh, arrays=arrays, elastic_axis="data")


@lru_cache(maxsize=4096)
def summary_of(
    slices: tuple[int, ...],
    replicas: int,
    index: int,
    number: int,
    generation: int,
    hosts_per_slice: int = 1,
) -> SnapshotSummary:
    """What a host of a world captures of a step."""
    layout = layout_for(slices, hosts_per_slice)
    host = host_of(index, hosts_per_slice)
    holdings = tuple(
        Holding(host=host, step=number, path=path, box=box, checksum=0, tier="shm")
        for path, box in host_captures(layout, host, replicas)
    )
    return SnapshotSummary(step=number, generation=generation, layout=layout, holdings=holdings)
