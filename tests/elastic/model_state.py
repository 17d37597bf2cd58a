"""The state that is trained: three arrays, replicated over the slices; and what a host captures of it."""

from __future__ import annotations

from functools import lru_cache

from elastic.events import SnapshotSummary, host_of
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.redundancy import host_captures

PATHS = ("bias", "moments", "weights")

Content = tuple[tuple[int, int], ...]
"""What a state is made of: each step it contains with the generation that made it."""


@lru_cache
def layout_for(slices: tuple[int, ...]) -> Layout:
    """The layout of the state on these slices, one device a host."""
    mesh = MeshLayout(
        axis_names=("data",), axis_sizes=(len(slices),), hosts=tuple(HostId(index) for index in slices)
    )
    arrays = tuple(ArrayLayout(path=path, shape=(4,), dtype="float32", itemsize=4) for path in PATHS)
    return Layout(mesh=mesh, arrays=arrays, elastic_axis="data")


@lru_cache(maxsize=4096)
def summary_of(
    slices: tuple[int, ...], replicas: int, index: int, number: int, generation: int
) -> SnapshotSummary:
    """What a host of a world captures of a step."""
    layout = layout_for(slices)
    host = host_of(index)
    holdings = tuple(
        Holding(host=host, step=number, path=path, box=box, checksum=0, tier="shm")
        for path, box in host_captures(layout, host, replicas)
    )
    return SnapshotSummary(step=number, generation=generation, layout=layout, holdings=holdings)
