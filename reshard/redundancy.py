"""The redundancy policy: which host keeps a copy of which shard, so that a lost slice loses nothing.

State that several slices hold needs no network copy: each slice captures a share, and the share shrinks
as slices grow. What fewer slices hold than copies are wanted, buddies on other slices pull over the network.
All functions are pure: every host computes the same answer, whatever the order of the arrays. For thousands
of hosts use those that return a `Stock`, or one host's share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reshard.boxes import Box
from reshard.grid import Column
from reshard.holdings import Shard
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.redundancy_buddies import KeptGroup, keep
from reshard.redundancy_dealing import deal
from reshard.stock import HeldGroup, Stock, tier_column


class BuddyCopy(NamedTuple):
    """One shard that a host keeps for others: it pulls the box from the first of `sources` that answers.

    `sources` are the hosts that capture the box, the one to ask first in front; never empty.
    """

    path: str
    box: Box
    sources: tuple[HostId, ...]


def captures(layout: Layout, replicas: int = 2) -> dict[HostId, tuple[Shard, ...]]:
    """Return the (path, box) shards each host captures, sorted; every host of the mesh has an entry.

    Each distinct box goes to min(`replicas`, slices that hold it) different slices, to one host in each. Of
    the empty parts of a padded array, which are all the same box, only the first one's holders count. Shares
    come out even (see `reshard.redundancy_dealing`). Raises `UsageError` when `replicas` is below 1.
    """
    dealing = deal(layout, replicas)
    chosen: list[list[Shard]] = [[] for _ in dealing.hosts]
    for group in dealing.groups:
        rows = np.flatnonzero(group.is_distinct(group.patterns.box))
        boxes = group.boxes(group.patterns.box[rows])
        for host, box in zip(group.host[rows].tolist(), boxes, strict=True):
            chosen[host] += [(path, box) for path in group.paths]
    return {host: tuple(sorted(shards)) for host, shards in zip(dealing.hosts, chosen, strict=True)}


def host_captures(layout: Layout, host: HostId, replicas: int = 2) -> tuple[Shard, ...]:
    """Return what `captures` gives one host, without the others; raises also for a host not in the mesh."""
    dealing = deal(layout, replicas)
    index = dealing.index_of(host)
    shards: list[Shard] = []
    for group in dealing.groups:
        own = group.patterns.box[group.host == index]
        boxes = group.boxes(own[group.is_distinct(own)])
        shards += [(path, box) for path in group.paths for box in boxes]
    return tuple(sorted(shards))


def capture_stock(layout: Layout, replicas: int = 2) -> Stock:
    """Return what `captures` gives all hosts, as columns; arrays that share a pattern share these."""
    dealing = deal(layout, replicas)
    columns: dict[tuple[int, int], tuple[Column, Column]] = {}
    groups: list[HeldGroup] = []
    for group in dealing.groups:
        host, tier = columns.setdefault(
            (id(group.patterns), group.pattern), (group.host, tier_column("shm", len(group.host)))
        )
        groups.append(
            HeldGroup(
                paths=group.paths,
                edges=group.edges,
                table=group.patterns.table,
                host=host,
                box=group.patterns.box,
                tier=tier,
            )
        )
    return Stock(hosts=dealing.hosts, groups=tuple(groups))


def buddies(layout: Layout, replicas: int = 2) -> dict[HostId, tuple[BuddyCopy, ...]]:
    """Return what each host must pull from others, sorted, so that `replicas` slices have each box.

    Only boxes that fewer than `replicas` slices hold need it: buddies are on slices without the box, no two
    on one slice, and when there are fewer slices than `replicas`, each slice ends with the box. See
    `reshard.redundancy_buddies` for who it is. Every host of the mesh has an entry. Raises `UsageError` when
    `replicas` is below 1.
    """
    hosts = layout.mesh.distinct_hosts()
    found: dict[HostId, list[BuddyCopy]] = {host: [] for host in hosts}
    for kept in keep(layout, replicas):
        for keeper, copies in _copies(kept, hosts, np.arange(len(kept.host))):
            found[hosts[keeper]] += copies
    return {host: tuple(sorted(copies)) for host, copies in found.items()}


def host_buddies(layout: Layout, host: HostId, replicas: int = 2) -> tuple[BuddyCopy, ...]:
    """Return what `buddies` gives one host, without the others; raises also for a host not in the mesh."""
    dealing = deal(layout, replicas)
    index = dealing.index_of(host)
    found: list[BuddyCopy] = []
    for kept in keep(layout, replicas):
        for _, copies in _copies(kept, dealing.hosts, np.flatnonzero(kept.host == index)):
            found += copies
    return tuple(sorted(found))


def needs_buddies(layout: Layout, replicas: int = 2) -> bool:
    """Tell whether any host keeps copies for others, as `buddies` has it; raises as it does."""
    return any(kept.group.is_distinct(kept.box).any() for kept in keep(layout, replicas))


def buddy_stock(layout: Layout, replicas: int = 2) -> Stock:
    """Return what `buddies` gives all hosts, as columns; no groups when all boxes have copies enough."""
    columns: dict[int, Column] = {}
    groups = [
        HeldGroup(
            paths=kept.group.paths[kept.first : kept.stop],
            edges=kept.group.edges,
            table=kept.group.patterns.table,
            host=kept.host,
            box=kept.box,
            tier=columns.setdefault(id(kept.host), tier_column("peer", len(kept.host))),
        )
        for kept in keep(layout, replicas)
    ]
    return Stock(hosts=layout.mesh.distinct_hosts(), groups=tuple(groups))


def _copies(
    kept: KeptGroup, hosts: tuple[HostId, ...], rows: Column
) -> Iterator[tuple[int, list[BuddyCopy]]]:
    """Yield (keeper, copies) for these rows of kept boxes. Which holder is asked first goes round."""
    group, made = kept.group, kept.group.patterns
    rows = rows[group.is_distinct(kept.box[rows])]
    boxes = kept.box[rows]
    for keeper, number, box in zip(kept.host[rows].tolist(), boxes.tolist(), group.boxes(boxes), strict=True):
        first = made.first_row[number]
        takers = [
            hosts[taker] for taker in sorted(group.host[first : first + made.num_copies[number]].tolist())
        ]
        turns = [tuple(takers[turn:] + takers[:turn]) for turn in range(len(takers))]
        place = int(made.place[number])
        yield (
            keeper,
            [
                BuddyCopy(path, box, turns[(rank // made.num_patterns + place) % len(turns)])
                for path, rank in zip(
                    group.paths[kept.first : kept.stop], group.ranks[kept.first : kept.stop], strict=True
                )
            ],
        )
