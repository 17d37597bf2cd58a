"""Whether dims divide over mesh axes, and what a spec becomes where one does not.

The coordinator's plan and a worker's mesh both ask these functions, so that they agree on the layout of a
state without a message. Source: JAX refuses uneven shards (`IndivisibleError`, jax/_src/sharding.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UsageError
from reshard.grid import slice_column
from reshard.ids import HostId
from reshard.layout import MeshLayout, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Dim `dim` has `size` elements, which do not divide into `num_parts`, one for each place on `axes`."""

    dim: int
    size: int
    num_parts: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"dim {self.dim} ({self.size:,}) does not divide into {self.num_parts}"


def misfits(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> tuple[Misfit, ...]:
    """Return the dims of `shape` that do not divide over axes of these `sizes`, by dim.

    A `spec` shorter than the shape leaves the last dims whole. Raises `UsageError` for a spec that is longer,
    or names an axis that is not in `sizes`.
    """
    if len(spec) > len(shape):
        raise UsageError(f"spec {spec} is for {len(spec)} dims, the shape {shape} has {len(shape)}")
    found: list[Misfit] = []
    for dim, (size, axes) in enumerate(zip(shape, spec, strict=False)):
        if unknown := [axis for axis in axes if axis not in sizes]:
            raise UsageError(f"the mesh has no axis {unknown[0]!r}, only {', '.join(sizes) or 'none'}")
        num_parts = math.prod(sizes[axis] for axis in axes)
        if size % num_parts:
            found.append(Misfit(dim=dim, size=size, num_parts=num_parts, axes=axes))
    return tuple(found)


def without_axis(spec: Spec, found: tuple[Misfit, ...], axis: str) -> Spec:
    """Return the spec with `axis` taken away from the dims of `found`: they are replicated over it."""
    dims = {misfit.dim for misfit in found}
    return tuple(
        tuple(name for name in axes if name != axis or dim not in dims) for dim, axes in enumerate(spec)
    )


def fitted_spec(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int], axis: str) -> Spec:
    """Return `spec`, in which a dim that does not divide is not partitioned over `axis` any more.

    Raises `UsageError` naming the dim when another axis is what does not divide.
    """
    fitted = without_axis(spec, misfits(shape, spec, sizes), axis)
    if left := misfits(shape, fitted, sizes):
        over = ", ".join(f"{name}={sizes[name]}" for name in left[0].axes)
        raise UsageError(
            f"{left[0]}, over {over}, in an array of shape {shape}",
            remedy=f"Use a size that divides, or do not partition this dim; only {axis!r} is given way.",
            dim=left[0].dim,
        )
    return fitted


def part_shape(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the parts that devices store, padded where dims do not divide."""
    counts = (math.prod(sizes[axis] for axis in axes) for axes in spec)
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


def spanning_axes(mesh: MeshLayout) -> tuple[str, ...]:
    """Return the axes along which the slice of the devices changes, in the order of the mesh."""
    grid = _slices(mesh)
    return tuple(name for dim, name in enumerate(mesh.axis_names) if np.diff(grid, axis=dim).any())


def broken_slices(mesh: MeshLayout, axis: str, present: Collection[int]) -> frozenset[int]:
    """Return the slices that have a place on `axis` in common with a slice that is not `present`.

    Where other axes span slices too, several slices make up one place (a replica of a pipeline, say); what is
    left of such a group fits nowhere else as it is.
    """
    grid = np.moveaxis(_slices(mesh), mesh.axis_names.index(axis), 0)
    places = [set(np.unique(place).tolist()) for place in grid]
    return frozenset(index for place in places if not place <= set(present) for index in place)


def hosts_of_slices(hosts: Iterable[HostId]) -> dict[int, tuple[HostId, ...]]:
    """Return the hosts of each slice, sorted."""
    found: defaultdict[int, list[HostId]] = defaultdict(list)
    for host in sorted(set(hosts)):
        found[host.slice_index].append(host)
    return {index: tuple(own) for index, own in found.items()}


def _slices(mesh: MeshLayout) -> NDArray[np.int64]:
    """Return the slice of each position, in the shape of the mesh."""
    return slice_column(mesh.distinct_hosts())[mesh.host_index()].reshape(mesh.axis_sizes)
