"""Random meshes, specs, layouts and boxes, and slow, obvious models to compare with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from reshard.boxes import Box
from reshard.holdings import Holding, layout_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout

PROPERTY = settings(
    max_examples=settings().max_examples * 3 // 5,  # of the profile: 15 by default, 600 with "deep"
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

AXES = ("data", "fsdp", "model")
ITEMSIZES = (1, 2, 3, 4, 8, 16)


@st.composite
def boxes(draw: st.DrawFn, rank: int, size: int = 5) -> Box:
    """A box inside an array of `size` in each dim; ranges may be empty."""
    ends = st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))
    return tuple(draw(ends) for _ in range(rank))


@st.composite
def meshes(draw: st.DrawFn, max_devices: int = 12) -> MeshLayout:
    """A mesh of 1 to 3 axes on hosts of equal size, positions in any host order."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        sizes.append(draw(st.integers(1, min(4, max_devices // math.prod(sizes)))))
    num_devices = math.prod(sizes)
    per_host = draw(st.sampled_from([n for n in range(1, num_devices + 1) if num_devices % n == 0]))
    hosts_per_slice = draw(st.integers(1, 2))
    first_slice = draw(st.integers(0, 2))
    owners = [
        HostId(first_slice + index // hosts_per_slice, index % hosts_per_slice)
        for index in range(num_devices // per_host)
        for _ in range(per_host)
    ]
    names = draw(st.permutations(AXES))[: len(sizes)]
    order = draw(st.one_of(st.just(owners), st.permutations(owners)))
    return MeshLayout(axis_names=tuple(names), axis_sizes=tuple(sizes), hosts=tuple(order))


@st.composite
def specs(draw: st.DrawFn, axis_names: tuple[str, ...], rank: int) -> tuple[tuple[str, ...], ...]:
    """Some of the axes, in any order, dealt over the dims."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(axis_names)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return tuple(tuple(axes) for axes in dims)


def num_parts(mesh: MeshLayout, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.axis_size(axis) for axis in axes)


@st.composite
def layout_pairs(draw: st.DrawFn, max_arrays: int = 3) -> tuple[Layout, Layout]:
    """The same arrays on two meshes whose hosts overlap or not, with unrelated specs."""
    old_mesh, new_mesh = draw(meshes()), draw(meshes())
    old: list[ArrayLayout] = []
    new: list[ArrayLayout] = []
    for index in range(draw(st.integers(1, max_arrays))):
        rank = draw(st.integers(0, 3))
        old_spec, new_spec = draw(specs(old_mesh.axis_names, rank)), draw(specs(new_mesh.axis_names, rank))
        padded = draw(st.sampled_from([False, False, True]))
        shape = tuple(
            draw(st.integers(0, 9))
            if padded
            else math.lcm(num_parts(old_mesh, o), num_parts(new_mesh, n))
            * draw(st.sampled_from([0, 1, 1, 2]))
            for o, n in zip(old_spec, new_spec, strict=True)
        )
        itemsize = draw(st.sampled_from(ITEMSIZES))
        for arrays, spec in ((old, old_spec), (new, new_spec)):
            arrays.append(
                ArrayLayout(
                    path=f"layer{index}/w",
                    shape=shape,
                    dtype="opaque",
                    itemsize=itemsize,
                    spec=spec,
                    padded=padded,
                )
            )
    return Layout(mesh=old_mesh, arrays=tuple(old)), Layout(mesh=new_mesh, arrays=tuple(new))


@st.composite
def losses(draw: st.DrawFn) -> tuple[Layout, list[Holding]]:
    """A target layout, and what some lost slices leave of the holdings of another, in any order."""
    old, new = draw(layout_pairs())
    holdings = layout_holdings(old, step=7)
    slices = sorted({holding.host.slice_index for holding in holdings})
    lost = draw(st.sets(st.sampled_from(slices), max_size=max(1, len(slices) - 1)))
    return new, draw(st.permutations([h for h in holdings if h.host.slice_index not in lost]))


@st.composite
def survivable_losses(draw: st.DrawFn) -> tuple[Layout, list[Holding]]:
    """As `losses`, but each lost holding that was the last of its box has a copy on some other host."""
    old, new = draw(layout_pairs())
    holdings = layout_holdings(old, step=7)
    slices = sorted({holding.host.slice_index for holding in holdings})
    lost = draw(st.sets(st.sampled_from(slices), max_size=max(1, len(slices) - 1)))
    kept = {(h.path, h.box): h for h in holdings if h.host.slice_index not in lost}
    rescued = [
        replace(h, host=HostId(draw(st.integers(0, 5))), tier="peer")
        for h in holdings
        if (h.path, h.box) not in kept
    ]
    return new, draw(st.permutations([h for h in holdings if h.host.slice_index not in lost] + rescued))


def mask_of(shape: tuple[int, ...], some_boxes: list[Box] | tuple[Box, ...]) -> np.ndarray:
    """The model of a set of boxes: True at each element that is in one of them."""
    mask = np.zeros(shape, dtype=bool)
    for box in some_boxes:
        mask[tuple(slice(start, stop) for start, stop in box)] = True
    return mask
