"""Which hosts keep copies of boxes that too few slices hold: the same place in the next slices, in a ring.

So a host pulls from few others, and keeps as much as it holds. Where that gives a host much more than its
fair share of the bytes, as slices hold unequally much, each host's boxes look for themselves for keepers with
room: in slices further on first, then at other places in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reshard.grid import Column
from reshard.layout import Layout, MeshLayout
from reshard.redundancy_dealing import DealtGroup, deal
from reshard.redundancy_patterns import slice_numbers

MAX_SHIFTS = 64
"""So many ways round the ring are tried before a keeper gets more than it should."""
SLACK = 4
"""The next in the ring keeps up to one part in so many more than its fair share, or one box more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptGroup:
    """Arrays `first` to `stop` of a group: `host[i]` keeps box `box[i]` of them, `[n]` each."""

    group: DealtGroup
    first: int
    stop: int
    host: Column
    box: Column


@lru_cache(maxsize=4)
def keep(layout: Layout, replicas: int) -> tuple[KeptGroup, ...]:
    """Return who keeps what, so that `replicas` slices, or all there are, have each box.

    Raises `UsageError` when `replicas` is below 1.
    """
    dealing = deal(layout, replicas)
    ring = _Ring(layout.mesh, replicas)
    short = [group for group in dealing.groups if len(ring.short_boxes(group))]
    total = sum(len(group.paths) * int(group.nbytes[ring.keepers(group, 0).box].sum()) for group in short)
    num_hosts = len(dealing.hosts)
    load = np.zeros(num_hosts, np.int64)
    return tuple(kept for group in short for kept in _kept(ring, group, load, -(-total // num_hosts)))


def _kept(ring: _Ring, group: DealtGroup, load: Column, fair_nbytes: int) -> Iterator[KeptGroup]:
    """Give the boxes of a group to keepers, and add their bytes to `load`."""
    most = fair_nbytes + max(fair_nbytes // SLACK, int(group.nbytes.max()))
    keepers = ring.keepers(group, 0)
    added = _added(group, keepers, load)
    if (load + len(group.paths) * added).max() <= most:
        load += len(group.paths) * added
        yield KeptGroup(group=group, first=0, stop=len(group.paths), host=keepers.host, box=keepers.box)
        return
    for boxes in ring.boxes_by_source(group):
        yield from _kept_apart(ring, group, boxes, load, most)


def _kept_apart(
    ring: _Ring, group: DealtGroup, boxes: Column, load: Column, most: int
) -> Iterator[KeptGroup]:
    """Give some boxes of a group to those that have room for it, the next in the ring first."""
    ways: list[tuple[_Keepers, Column]] = []
    num_arrays, done = len(group.paths), 0
    for shift in range(ring.num_shifts):
        keepers = ring.keepers(group, shift).of(boxes)
        added = _added(group, keepers, load)
        room = (most - load[added > 0]) // added[added > 0]
        num = int(np.clip(room.min(initial=num_arrays), 0, num_arrays - done))
        if num:
            load += num * added
            yield KeptGroup(group=group, first=done, stop=done + num, host=keepers.host, box=keepers.box)
            done += num
        if done == num_arrays:
            return
        ways.append((keepers, added))
    for index in range(done, num_arrays):  # nobody has room: whose fullest keeper is the least full
        keepers, added = min(ways, key=lambda way: int(load[way[0].host].max()))
        load += added
        yield KeptGroup(group=group, first=index, stop=index + 1, host=keepers.host, box=keepers.box)


def _added(group: DealtGroup, keepers: _Keepers, load: Column) -> Column:
    """Return the bytes that one array of the group adds to each host's load."""
    added = np.zeros_like(load)
    np.add.at(added, keepers.host, group.nbytes[keepers.box])
    return added


@dataclass(frozen=True, slots=True, eq=False)
class _Keepers:
    """Who keeps which box, `[n]` each."""

    host: Column
    box: Column

    def of(self, boxes: Column) -> _Keepers:
        rows = np.isin(self.box, boxes)
        return _Keepers(self.host[rows], self.box[rows])


class _Ring:
    """The slices of a mesh in a ring, and the hosts in each."""

    __slots__ = ("_first_host", "_keepers", "_place", "_size", "_slice", "_wanted", "num_shifts")

    def __init__(self, mesh: MeshLayout, replicas: int) -> None:
        self._slice, self._place = slice_numbers(mesh)
        self._size = np.bincount(self._slice)
        self._first_host = np.cumsum(self._size) - self._size
        self._wanted = min(replicas, len(self._size))
        self._keepers: dict[tuple[int, int, int], _Keepers] = {}
        self.num_shifts = min((len(self._size) - 1) * int(self._size.max()), MAX_SHIFTS)

    def short_boxes(self, group: DealtGroup) -> Column:
        """Return the numbers of the boxes that too few slices hold; all of these capture them."""
        return np.flatnonzero(group.patterns.num_slices < self._wanted)

    def boxes_by_source(self, group: DealtGroup) -> list[Column]:
        """Return the short boxes by the last of the hosts that capture them: who keeps them goes by that."""
        made, short = group.patterns, self.short_boxes(group)
        last = np.maximum.reduceat(group.host, made.first_row)[short]
        return [short[last == host] for host in np.unique(last)]

    def keepers(self, group: DealtGroup, shift: int) -> _Keepers:
        """Return who keeps the short boxes of a group when everybody moves on by `shift` slices.

        After a whole turn it is another host of the slice. Groups of one pattern have the same columns.
        """
        key = id(group.patterns), group.pattern, shift
        if key not in self._keepers:
            made = group.patterns
            short = self.short_boxes(group)
            hosts: list[Column] = []
            boxes: list[Column] = []
            for held_by in sorted(set(made.num_slices[short].tolist())):
                alike = short[made.num_slices[short] == held_by]
                takers = np.sort(group.host[made.first_row[alike, None] + np.arange(held_by)], axis=1)
                for copy in range(self._wanted - held_by):
                    hosts.append(self._after(takers, shift + copy, shift))
                    boxes.append(alike)
            self._keepers[key] = _Keepers(np.concatenate(hosts), np.concatenate(boxes))
        return self._keepers[key]

    def _after(self, takers: Column, step: int, shift: int) -> Column:
        """Return a host `step` slices after the last of the takers, `[n, held_by]`, skipping theirs."""
        num_free = len(self._size) - takers.shape[1]
        last = takers[:, -1]
        behind = np.sort((self._slice[takers] - self._slice[last, None]) % len(self._size), axis=1)
        offset = np.full(len(takers), 1 + step % num_free)
        for taken in behind.T[1:]:
            offset += offset >= taken
        chosen = (self._slice[last] + offset) % len(self._size)
        place = self._place[last] + shift // num_free
        host: Column = self._first_host[chosen] + place % self._size[chosen]
        return host
