"""Where every element of every array lives: mesh, partition spec, and the box of each mesh position.

Boxes are those of JAX's `NamedSharding`: a dimension partitioned over several axes is split by the
first-named axis outermost, axes a spec does not mention replicate, and a dimension that does not divide
evenly is refused, unless the array is stored padded. Source: https://docs.jax.dev/en/latest/jax.sharding.html
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from reshard.boxes import Box, volume
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.mesh import MeshLayout, mesh_of_hosts

__all__ = ["ArrayLayout", "Layout", "MeshLayout", "Spec", "dim_edges", "spec_from_partition"]

MOST_BYTES = 2**62
"""What is counted of a state is below this: 64-bit numbers hold it, with room to round up."""

Spec = tuple[tuple[str, ...], ...]
"""For each dimension of an array, the mesh axes that partition it, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayLayout:
    """One array: its tree path, global shape, element type, and the mesh axes that partition each dim.

    `itemsize` is in bytes and is all that moving data needs to know of `dtype`. A `spec` shorter than
    the shape is completed with unpartitioned dims. `padded`: the devices hold the array padded to parts of
    equal length, so any dim can be split; its boxes leave the padding out (see `dim_edges`). Raises
    `UsageError` when they contradict.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    spec: Spec = ()
    padded: bool = False

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise UsageError(f"array {self.path!r} has a negative dim: {self.shape}", path=self.path)
        if self.itemsize < 1:
            raise UsageError(
                f"array {self.path!r} has itemsize {self.itemsize}, not positive", path=self.path
            )
        if max(self.nbytes, *self.shape, self.itemsize) > MOST_BYTES:
            raise UsageError(
                f"array {self.path!r} of shape {self.shape} has more bytes than can be counted",
                remedy="See whether the shape is right.",
                path=self.path,
            )
        if len(self.spec) > len(self.shape):
            raise UsageError(
                f"array {self.path!r} has {len(self.shape)} dims, its spec {self.spec} has {len(self.spec)}",
                path=self.path,
            )
        axes = [axis for dim_axes in self.spec for axis in dim_axes]
        if len(set(axes)) != len(axes):
            raise UsageError(f"array {self.path!r} uses a mesh axis twice: {self.spec}", path=self.path)
        padding: Spec = ((),) * (len(self.shape) - len(self.spec))
        object.__setattr__(self, "spec", self.spec + padding)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, counted once."""
        return math.prod(self.shape) * self.itemsize

    def box_nbytes(self, box: Box) -> int:
        """Bytes of one box of this array."""
        return volume(box) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Every array of the state on one mesh; `elastic_axis` is the axis that spans slices, if any.

    Raises `UsageError` naming the array, the dim and the axis when a spec does not fit the mesh, and when all
    devices together have more bytes than can be counted.
    """

    mesh: MeshLayout
    arrays: tuple[ArrayLayout, ...]
    elastic_axis: str | None = None

    def __post_init__(self) -> None:
        if self.elastic_axis is not None:
            self.mesh.axis_size(self.elastic_axis)
        seen: set[str] = set()
        part_nbytes: dict[tuple[tuple[int, ...], Spec, bool, int], int] = {}
        device_nbytes = 0
        for array in self.arrays:
            if array.path in seen:
                raise UsageError(f"array {array.path!r} is listed twice", path=array.path)
            seen.add(array.path)
            # Layers repeat the same few shapes: thousands of arrays need few checks.
            kind = (array.shape, array.spec, array.padded, array.itemsize)
            if kind not in part_nbytes:
                _check_fits(array, self.mesh)
                part_nbytes[kind] = _part_nbytes(array, self.mesh)
            device_nbytes += part_nbytes[kind]
        if device_nbytes * self.mesh.num_devices > MOST_BYTES:
            raise UsageError(
                f"{self.mesh.num_devices:,} devices of {device_nbytes:,} bytes of state each are more bytes "
                f"than can be counted",
                remedy="See whether the shapes are right.",
            )

    def boxes(self, array: ArrayLayout) -> tuple[Box, ...]:
        """Return the box of `array` at each mesh position, in C order."""
        return _boxes_by_position(self.mesh, array.shape, array.spec)

    def boxes_by_host(self, array: ArrayLayout) -> dict[HostId, tuple[Box, ...]]:
        """Return the distinct boxes of `array` on each host, sorted; hosts in order."""
        return dict(_boxes_by_host(self.mesh, array.shape, array.spec))

    def resized(self, hosts: Iterable[HostId], devices_per_host: int) -> Layout:
        """Return the same arrays and specs on other hosts: the elastic axis takes what size is left.

        Hosts are put in index order and the elastic axis outermost, whatever its place in the mesh, so
        that other axes stay inside a slice and the layout does not depend on which slice was lost.
        Raises `UsageError` when the devices do not factor or a dim no longer divides.
        """
        ordered = sorted(hosts, key=attrgetter("slice_index", "host_index"))
        if len(set(ordered)) != len(ordered):
            raise UsageError(f"hosts repeat: {', '.join(map(str, ordered))}")
        if not ordered or devices_per_host < 1:
            raise UsageError(f"cannot lay out on {len(ordered)} hosts of {devices_per_host} devices")
        num_devices = len(ordered) * devices_per_host
        sizes = self.mesh.sizes()
        if self.elastic_axis is not None:
            sizes[self.elastic_axis] = _elastic_size(self.mesh, self.elastic_axis, num_devices)
        elif num_devices != self.mesh.num_devices:
            raise UsageError(
                f"no axis spans slices, so {num_devices} devices cannot replace {self.mesh.num_devices}"
            )
        return replace(
            self, mesh=mesh_of_hosts(ordered, devices_per_host, sizes, outermost=self.elastic_axis)
        )


def dim_edges(size: int, num_parts: int) -> npt.NDArray[np.int64]:
    """Return where the parts of a dim begin and end: `[num_parts + 1]`, part i is `[edges[i], edges[i + 1])`.

    Parts have the length of the first, as when the dim is padded to a multiple of it; the last ones end at
    `size`, so they may be shorter or empty. All are equal when `num_parts` divides `size`.
    """
    length = -(-size // num_parts)
    return np.minimum(np.arange(num_parts + 1, dtype=np.int64) * length, size)


def spec_from_partition(entries: Sequence[str | Sequence[str] | None]) -> Spec:
    """Turn the entries of a JAX `PartitionSpec` into a `Spec`.

    Raises `UsageError` for an entry that is neither None, an axis name nor a sequence of axis names.
    """
    spec: list[tuple[str, ...]] = []
    for entry in entries:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, (tuple, list)) or not all(isinstance(axis, str) for axis in axes):
            raise UsageError(f"partition spec entry {entry!r} does not name mesh axes")
        spec.append(tuple(axes))
    return tuple(spec)


def _elastic_size(mesh: MeshLayout, axis: str, num_devices: int) -> int:
    fixed = mesh.num_devices // mesh.axis_size(axis)
    size, rest = divmod(num_devices, fixed)
    if rest or not size:
        others = [f"{name}={size}" for name, size in mesh.sizes().items() if name != axis]
        raise UsageError(
            f"{num_devices} devices are not a multiple of {fixed} ({', '.join(others)}), "
            f"so axis {axis!r} has no size",
            remedy="Use a number of hosts whose devices the fixed axes divide, or other axis sizes.",
            num_devices=num_devices,
            elastic_axis=axis,
        )
    return size


def _check_fits(array: ArrayLayout, mesh: MeshLayout) -> None:
    for dim, (size, axes) in enumerate(zip(array.shape, array.spec, strict=True)):
        num_parts = mesh.num_parts(axes)
        if size % num_parts and not array.padded:
            raise UsageError(
                f"dim {dim} of {array.path!r} has size {size}, which axes {', '.join(axes)} "
                f"cannot split evenly into {num_parts}",
                remedy="Use sizes of these axes that divide it, or replicate or pad this dim.",
                path=array.path,
                dim=dim,
                size=size,
                num_parts=num_parts,
            )


def _part_nbytes(array: ArrayLayout, mesh: MeshLayout) -> int:
    """Return the bytes of the first part of an array, which is the largest."""
    sizes = zip(array.shape, array.spec, strict=True)
    return math.prod(-(-size // mesh.num_parts(axes)) for size, axes in sizes) * array.itemsize


@lru_cache(maxsize=128)
def _boxes_by_position(mesh: MeshLayout, shape: tuple[int, ...], spec: Spec) -> tuple[Box, ...]:
    boxes, place = _distinct_boxes(mesh, shape, spec)
    return tuple(boxes[index] for index in place.tolist())


@lru_cache(maxsize=128)
def _boxes_by_host(
    mesh: MeshLayout, shape: tuple[int, ...], spec: Spec
) -> tuple[tuple[HostId, tuple[Box, ...]], ...]:
    boxes, place = _distinct_boxes(mesh, shape, spec)
    hosts = mesh.distinct_hosts()
    owned = np.unique(mesh.host_index() * len(boxes) + place)
    ends = np.searchsorted(owned, np.arange(1, len(hosts) + 1) * len(boxes)).tolist()
    places = (owned % len(boxes)).tolist()
    return tuple(
        (host, tuple(boxes[index] for index in places[start:end]))
        for host, start, end in zip(hosts, [0, *ends[:-1]], ends, strict=True)
    )


def _distinct_boxes(
    mesh: MeshLayout, shape: tuple[int, ...], spec: Spec
) -> tuple[list[Box], npt.NDArray[np.int64]]:
    """Return the boxes that there are, sorted, and which of them each position has."""
    part = np.zeros(mesh.num_devices, np.int64)  # in C order of the dims' parts, so as boxes are sorted
    ranges: list[list[tuple[int, int]]] = []
    for size, axes in zip(shape, spec, strict=True):
        edges = dim_edges(size, mesh.num_parts(axes)).tolist()
        own = list(dict.fromkeys(pairwise(edges)))  # empty parts at the end are one
        part = part * len(own) + np.minimum(mesh.part_index(axes), len(own) - 1)
        ranges.append(own)
    distinct, place = np.unique(part, return_inverse=True)
    if not shape:
        return [()], place
    indices = np.unravel_index(distinct, [len(own) for own in ranges])
    columns = [[own[index] for index in along.tolist()] for own, along in zip(ranges, indices, strict=True)]
    return list(zip(*columns, strict=True)), place
