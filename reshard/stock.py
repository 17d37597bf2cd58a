"""Who holds what, as columns: holdings of thousands of hosts without an object for each.

Layers share shapes, and arrays of one shape are mostly held in the same boxes by the same hosts. Such arrays
are one *group*: the boxes and holders are written once, whatever their number.
Arrays of different shapes that are partitioned and held alike share the columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from reshard.boxes import Box, check_box
from reshard.errors import UsageError
from reshard.grid import (
    BoxTable,
    Column,
    Edges,
    as_boxes,
    element_boxes,
    layout_edges,
    num_elements,
    placement,
    table_of_boxes,
)
from reshard.holdings import TIERS, Holding, Tier
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldGroup:
    """Shards of several arrays, all of one shape, that are held alike.

    `table` has the boxes as ranges of the numbers of `edges` (see `reshard.grid`); `host`, `box` and `tier`
    have one entry a holding, `[n]`: indices into the stock's hosts, into the table and into `TIERS`. Groups
    that share these four objects share the work of planning, whatever their edges. Raises `UsageError` when
    the columns do not agree.
    """

    paths: tuple[str, ...]
    edges: Edges
    table: BoxTable
    host: Column
    box: Column
    tier: Column

    def __post_init__(self) -> None:
        if self.table.low.shape[1] != len(self.edges):
            raise UsageError(f"boxes of {self.paths[:1]} have not as many dims as edges")
        if not len(self.host) == len(self.box) == len(self.tier):
            raise UsageError(f"holdings of {self.paths[:1]} have columns of different lengths")

    @property
    def boxes(self) -> Column:
        """The boxes as element ranges, shape `[num_boxes, rank, 2]`."""
        return element_boxes(self.edges, self.table)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stock:
    """All holdings of one step. `hosts` are sorted; a path may be in several groups."""

    hosts: tuple[HostId, ...]
    groups: tuple[HeldGroup, ...]

    @classmethod
    def of_holdings(cls, holdings: Iterable[Holding], step: int) -> Stock:
        """Return the stock of those of `holdings` that are of `step`; arrays held alike become one group."""
        by_path: defaultdict[tuple[str, int], set[tuple[Box, HostId, Tier]]] = defaultdict(set)
        for holding in holdings:
            if holding.step == step:  # by rank too, as boxes of another one fit no array of that path
                by_path[holding.path, len(holding.box)].add((holding.box, holding.host, holding.tier))
        hosts = tuple(sorted({host for held in by_path.values() for _, host, _ in held}))
        index = {host: at for at, host in enumerate(hosts)}
        alike: defaultdict[frozenset[tuple[Box, HostId, Tier]], list[str]] = defaultdict(list)
        for (path, _), held in sorted(by_path.items()):
            alike[frozenset(held)].append(path)
        return cls(hosts=hosts, groups=tuple(_group(paths, held, index) for held, paths in alike.items()))

    @classmethod
    def of_layout(cls, layout: Layout, tier: Tier = "shm") -> Stock:
        """Return the stock of every host that has all its boxes of the layout in `tier`."""
        alike: defaultdict[tuple[tuple[int, ...], Spec], list[ArrayLayout]] = defaultdict(list)
        for array in layout.arrays:
            alike[array.shape, array.spec].append(array)
        tiers: dict[Spec, Column] = {}
        groups = []
        for (_, spec), arrays in alike.items():
            placed = placement(layout.mesh, spec)
            if spec not in tiers:
                tiers[spec] = tier_column(tier, len(placed.host))
            groups.append(
                HeldGroup(
                    paths=tuple(array.path for array in arrays),
                    edges=layout_edges(layout.mesh, arrays[0]),
                    table=placed.table,
                    host=placed.host,
                    box=placed.box,
                    tier=tiers[spec],
                )
            )
        return cls(hosts=layout.mesh.distinct_hosts(), groups=tuple(groups))

    def without(self, lost: Iterable[HostId]) -> Stock:
        """Return what is left when these hosts are gone."""
        gone = set(lost)
        kept = np.array([host not in gone for host in self.hosts], bool)
        number = np.cumsum(kept) - 1
        left = tuple(host for host in self.hosts if host not in gone)

        def change(group: HeldGroup) -> tuple[Column, Column, Column]:
            rows = kept[group.host]
            return number[group.host[rows]], group.box[rows], group.tier[rows]

        return Stock(hosts=left, groups=_with_columns(self.groups, change))

    def merged(self, other: Stock) -> Stock:
        """Return the holdings of both."""
        hosts = tuple(sorted({*self.hosts, *other.hosts}))
        index = {host: at for at, host in enumerate(hosts)}
        groups: list[HeldGroup] = []
        for stock in (self, other):
            number = np.array([index[host] for host in stock.hosts], np.int64)
            groups += _with_columns(stock.groups, _renumbering(number))
        return Stock(hosts=hosts, groups=tuple(groups))

    def bytes_by_host(self, layout: Layout) -> dict[HostId, int]:
        """Return the bytes of arrays of `layout` that each host holds; a box held twice counts twice."""
        itemsize = {array.path: array.itemsize for array in layout.arrays}
        total = np.zeros(len(self.hosts), np.int64)
        for group in self.groups:
            item_bytes = sum(itemsize[path] for path in group.paths)
            box_bytes = num_elements(group.edges, group.table.low, group.table.high) * item_bytes
            np.add.at(total, group.host, box_bytes[group.box])
        return dict(zip(self.hosts, total.tolist(), strict=True))


def tier_column(tier: Tier, num: int) -> Column:
    """Return a column of `num` holdings that are all in `tier`, as indices into `TIERS`."""
    return np.full(num, TIERS.index(tier), np.int64)


def held_boxes_of(group: HeldGroup) -> list[Box]:
    """Return the boxes that somebody holds, each once."""
    held = np.unique(group.box)
    return as_boxes(group.boxes[held])


def check_inside(group: HeldGroup, array: ArrayLayout) -> None:
    """Raise `UsageError` when a box that somebody holds is outside the array."""
    rank_agrees = len(group.edges) == len(array.shape)
    if rank_agrees and all(
        not len(along) or (along[0] >= 0 and along[-1] <= size)
        for along, size in zip(group.edges, array.shape, strict=True)
    ):
        return
    for box in held_boxes_of(group):
        check_box(box, array.shape)


def check_stock(stock: Stock, arrays: Iterable[ArrayLayout]) -> None:
    """Raise `UsageError` when a box that somebody holds is outside its array, if it is one of `arrays`."""
    by_path = {array.path: array for array in arrays}
    for group in stock.groups:
        known = {by_path[path].shape: by_path[path] for path in group.paths if path in by_path}
        for array in known.values():
            check_inside(group, array)


def _renumbering(number: Column) -> Callable[[HeldGroup], tuple[Column, Column, Column]]:
    return lambda group: (number[group.host], group.box, group.tier)


def _with_columns(
    groups: Iterable[HeldGroup], change: Callable[[HeldGroup], tuple[Column, Column, Column]]
) -> tuple[HeldGroup, ...]:
    """Return the groups with other columns; those that shared theirs share the new ones too."""
    made: dict[tuple[int, int, int], tuple[Column, Column, Column]] = {}
    changed: list[HeldGroup] = []
    for group in groups:
        key = id(group.host), id(group.box), id(group.tier)
        if key not in made:
            made[key] = change(group)
        host, box, tier = made[key]
        changed.append(replace(group, host=host, box=box, tier=tier))
    return tuple(changed)


def _group(
    paths: Iterable[str], held: Iterable[tuple[Box, HostId, Tier]], index: Mapping[HostId, int]
) -> HeldGroup:
    rows = sorted(held)
    distinct = sorted({box for box, _, _ in rows})
    number = {box: at for at, box in enumerate(distinct)}
    edges, table = table_of_boxes(np.array(distinct, np.int64).reshape(len(distinct), len(distinct[0]), 2))
    return HeldGroup(
        paths=tuple(paths),
        edges=edges,
        table=table,
        host=np.array([index[host] for _, host, _ in rows], np.int64),
        box=np.array([number[box] for box, _, _ in rows], np.int64),
        tier=np.array([TIERS.index(tier) for _, _, tier in rows], np.int64),
    )
