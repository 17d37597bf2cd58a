"""The mesh of devices: its axes, the host of each position, and how positions count along the axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from reshard.errors import UsageError
from reshard.ids import HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """A logical mesh of devices and the host that owns each position.

    `hosts` has one entry per mesh position, in C order of the axes. Raises `UsageError` when names
    repeat, a size is not positive, or the counts do not agree.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    hosts: tuple[HostId, ...]

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.axis_sizes):
            raise UsageError(f"{len(self.axis_names)} mesh axes but {len(self.axis_sizes)} sizes")
        if len(set(self.axis_names)) != len(self.axis_names):
            raise UsageError(f"mesh axis names repeat: {self.axis_names}")
        if any(size < 1 for size in self.axis_sizes):
            raise UsageError(f"mesh axis sizes must be at least 1, got {self.axis_sizes}")
        if len(self.hosts) != self.num_devices:
            raise UsageError(
                f"a mesh of {self._describe()} has {self.num_devices} positions, got {len(self.hosts)} hosts"
            )

    def __hash__(self) -> int:
        # Hashing thousands of hosts on every cache lookup would cost more than what the caches save.
        return hash((self.axis_names, self.axis_sizes, self.hosts[0], self.hosts[-1]))

    @property
    def num_devices(self) -> int:
        """The number of mesh positions."""
        return math.prod(self.axis_sizes)

    @property
    def num_slices(self) -> int:
        """The number of slices that have a position."""
        return len({host.slice_index for host in self.distinct_hosts()})

    def sizes(self) -> dict[str, int]:
        """Return the size of each axis by name, in order."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    def axis_size(self, name: str) -> int:
        """Return the size of an axis; raises `UsageError` for an axis the mesh does not have."""
        if name not in self.axis_names:
            raise UsageError(f"the mesh has no axis {name!r}, only {', '.join(self.axis_names) or 'none'}")
        return self.axis_sizes[self.axis_names.index(name)]

    def num_parts(self, axes: Sequence[str]) -> int:
        """Return into how many parts a dim is split over `axes`; raises `UsageError` as `axis_size` does."""
        return math.prod(map(self.axis_size, axes))

    def distinct_hosts(self) -> tuple[HostId, ...]:
        """Return the hosts of the mesh, sorted, each once."""
        return _numbered_hosts(self)[0]

    def host_index(self) -> npt.NDArray[np.int64]:
        """Return each position's host as an index into `distinct_hosts()`: `[num_devices]`, read-only."""
        return _numbered_hosts(self)[1]

    def part_index(self, axes: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return which part of a dim split over `axes`, outermost first, each position has: `[num_devices]`.

        Raises `UsageError` for an axis the mesh does not have.
        """
        part = np.zeros((1,) * len(self.axis_sizes), np.int64)
        for axis in axes:
            size = self.axis_size(axis)
            place = [size if name == axis else 1 for name in self.axis_names]
            part = part * size + np.arange(size, dtype=np.int64).reshape(place)
        return np.broadcast_to(part, self.axis_sizes).reshape(-1)

    def axes_of_parts(self, part_index: npt.NDArray[np.int64]) -> tuple[str, ...] | None:
        """Return the axes whose `part_index` this is, without those of size 1; None when no axes have it."""
        parts = part_index.reshape(self.axis_sizes)
        origin = (0,) * parts.ndim
        # A step along an axis passes as many parts as the axes named after it make together.
        strides = {
            name: int(parts[(*origin[:dim], 1, *origin[dim + 1 :])])
            for dim, name in enumerate(self.axis_names)
            if self.axis_sizes[dim] > 1
        }
        axes = tuple(
            sorted((name for name in strides if strides[name]), key=strides.__getitem__, reverse=True)
        )
        return axes if np.array_equal(self.part_index(axes), part_index) else None

    def _describe(self) -> str:
        return "×".join(f"{name}={size}" for name, size in self.sizes().items()) or "no axes"


def mesh_of_hosts(
    hosts: Sequence[HostId], devices_per_host: int, sizes: Mapping[str, int], *, outermost: str | None
) -> MeshLayout:
    """Return the mesh with axes of these `sizes` on `hosts`, in this order, the devices of each together.

    The axis `outermost`, whatever its place among the others, changes slowest from device to device. The
    sizes must multiply to the number of devices.
    """
    outer_first = sorted(sizes, key=lambda name: name != outermost)
    owners = np.repeat(np.arange(len(hosts)), devices_per_host).reshape([sizes[name] for name in outer_first])
    grid = owners.transpose([outer_first.index(name) for name in sizes])
    return MeshLayout(
        axis_names=tuple(sizes),
        axis_sizes=tuple(sizes.values()),
        hosts=tuple(hosts[index] for index in grid.ravel().tolist()),
    )


@lru_cache(maxsize=16)
def _numbered_hosts(mesh: MeshLayout) -> tuple[tuple[HostId, ...], npt.NDArray[np.int64]]:
    num_devices = mesh.num_devices
    slices = np.fromiter((host.slice_index for host in mesh.hosts), np.int64, num_devices)
    within = np.fromiter((host.host_index for host in mesh.hosts), np.int64, num_devices)
    order = np.lexsort((within, slices))
    is_next = np.diff(slices[order], prepend=-1) != 0
    is_next |= np.diff(within[order], prepend=-1) != 0
    index = np.empty(num_devices, np.int64)
    index[order] = np.cumsum(is_next) - 1
    index.flags.writeable = False
    return tuple(mesh.hosts[position] for position in order[is_next].tolist()), index
