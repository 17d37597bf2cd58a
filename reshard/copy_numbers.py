"""Numbers for the boxes of a layout, and which of them each host has: worked out when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from reshard.grid import Column, layout_edges
from reshard.holdings import Shard
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from reshard.redundancy_dealing import as_cut, deal, last_part


class ShardNumbers:
    """The shards of a layout, (path, box), by number; they are sorted, and made when asked for.

    The boxes of an array are numbered in C order of the parts of its dims. Of parts that are empty alike only
    the first one's number is used.
    """

    __slots__ = ("_arrays", "_begin", "_layout", "_place")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._arrays = sorted(map(as_cut, layout.arrays), key=lambda array: array.path)
        num_boxes = [math.prod(self.num_parts(array)) for array in self._arrays]
        self._begin = np.concatenate((np.zeros(1, np.int64), np.cumsum(num_boxes, dtype=np.int64)))
        self._place = {array.path: place for place, array in enumerate(self._arrays)}

    def __len__(self) -> int:
        return int(self._begin[-1])

    def __getitem__(self, number: int) -> Shard:
        if not 0 <= number < len(self):
            raise IndexError(number)
        place = int(np.searchsorted(self._begin, number, side="right")) - 1
        array = self._arrays[place]
        parts = np.unravel_index(number - self._begin[place], self.num_parts(array))
        edges = layout_edges(self._layout.mesh, array)
        box = ((int(along[part]), int(along[part + 1])) for along, part in zip(edges, parts, strict=True))
        return array.path, tuple(box)

    def num_parts(self, array: ArrayLayout) -> tuple[int, ...]:
        """Return into how many parts each dim of an array is cut."""
        return tuple(map(self._layout.mesh.num_parts, array.spec))

    def first(self, path: str) -> int:
        """Return the number of the first box of an array."""
        return int(self._begin[self._place[path]])


class ByHost(Mapping[HostId, Column]):
    """A column for each of `hosts`, made by `column_of` when it is first asked for."""

    def __init__(self, hosts: tuple[HostId, ...], column_of: Callable[[int], Column]) -> None:
        self._index = {host: index for index, host in enumerate(hosts)}
        self._column_of = column_of
        self._made: dict[HostId, Column] = {}

    def __getitem__(self, host: HostId) -> Column:
        if host not in self._made:
            self._made[host] = self._column_of(self._index[host])
        return self._made[host]

    def __contains__(self, host: object) -> bool:
        return host in self._index

    def __iter__(self) -> Iterator[HostId]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def captured_by_host(layout: Layout, replicas: int, numbers: ShardNumbers) -> ByHost:
    """Return the numbers of what `reshard.captures` gives each host, in its order."""
    dealing = deal(layout, replicas)
    first = {id(group): np.array([numbers.first(path) for path in group.paths]) for group in dealing.groups}

    def column_of(host: int) -> Column:
        own = [
            np.add.outer(first[id(group)], own[group.is_distinct(own)]).ravel()
            for group in dealing.groups
            for own in [group.patterns.box[group.host == host]]
        ]
        return np.sort(np.concatenate([*own, np.zeros(0, np.int64)]))

    return ByHost(dealing.hosts, column_of)


def held_by_host(layout: Layout, positions: Mapping[HostId, Column], numbers: ShardNumbers) -> ByHost:
    """Return the numbers of what the devices of each host hold: array by array, devices in mesh order."""
    mesh = layout.mesh
    box_at: dict[object, Column] = {}  # the box at each mesh position, for arrays that are cut alike
    keys: list[object] = []
    for array in map(as_cut, layout.arrays):
        last_parts = tuple(map(last_part, layout_edges(mesh, array)))
        keys.append((array.spec, last_parts))
        if keys[-1] not in box_at:
            box = np.zeros(mesh.num_devices, np.int64)
            for axes, last in zip(array.spec, last_parts, strict=True):
                box = box * mesh.num_parts(axes) + np.minimum(mesh.part_index(axes), last)
            box_at[keys[-1]] = box
    first = [numbers.first(array.path) for array in layout.arrays]
    hosts = mesh.distinct_hosts()

    def column_of(host: int) -> Column:
        own = positions[hosts[host]]
        held = {key: box[own] for key, box in box_at.items()}
        rows = [begin + held[key] for begin, key in zip(first, keys, strict=True)]
        return np.concatenate([*rows, np.zeros(0, np.int64)])

    return ByHost(hosts, column_of)
