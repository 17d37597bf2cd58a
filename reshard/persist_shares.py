"""Which host writes which shard of a snapshot to the persistent tier: one of those that capture it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reshard.grid import Column
from reshard.holdings import Shard
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.redundancy_dealing import DealtGroup, Scale, deal


def persist_shares(layout: Layout, replicas: int = 2) -> dict[HostId, tuple[Shard, ...]]:
    """Return the (path, box) shards each host writes, sorted; every host of the mesh has an entry.

    Each distinct shard goes to exactly one of the hosts that `reshard.captures` gives it, so that all write
    equally much. A pure function, whatever the order of the arrays. Raises `UsageError` when `replicas` is
    below 1.
    """
    hosts = deal(layout, replicas).hosts
    shares: list[list[Shard]] = [[] for _ in hosts]
    for written in _written(layout, replicas):
        numbers = np.flatnonzero(written.group.is_distinct(np.arange(len(written.host))))
        boxes = written.group.boxes(numbers)
        for host, box in zip(written.host[numbers].tolist(), boxes, strict=True):
            shares[host] += [(path, box) for path in written.paths]
    return {host: tuple(sorted(shards)) for host, shards in zip(hosts, shares, strict=True)}


def host_persist_shares(layout: Layout, host: HostId, replicas: int = 2) -> tuple[Shard, ...]:
    """Return what `persist_shares` gives one host, without the others; raises also outside the mesh."""
    index = deal(layout, replicas).index_of(host)
    shards: list[Shard] = []
    for written in _written(layout, replicas):
        own = np.flatnonzero(written.host == index)
        boxes = written.group.boxes(own[written.group.is_distinct(own)])
        shards += [(path, box) for path in written.paths for box in boxes]
    return tuple(sorted(shards))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Written:
    """Arrays of a group whose box `i` is written by `host[i]`: `[num_boxes]`."""

    group: DealtGroup
    paths: tuple[str, ...]
    host: Column


@lru_cache(maxsize=4)
def _written(layout: Layout, replicas: int) -> tuple[_Written, ...]:
    """Deal turns to arrays, as patterns are dealt: with a turn, the next holder of each box writes it."""
    dealing = deal(layout, replicas)
    scale = Scale(len(dealing.hosts))
    options = [_options(group) for group in dealing.groups]
    nbytes = [np.maximum(group.nbytes, 1) for group in dealing.groups]  # empty boxes are dealt evenly too
    in_order = sorted(
        (rank, path, number)
        for number, group in enumerate(dealing.groups)
        for rank, path in zip(group.ranks, group.paths, strict=True)
    )
    paths: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for _, path, number in in_order:
        group = dealing.groups[number]
        key = id(group.patterns), group.pattern
        paths[number, scale.take_lightest(key, options[number], nbytes[number])].append(path)
    return tuple(
        _Written(group=dealing.groups[number], paths=tuple(alike), host=options[number][turn])
        for (number, turn), alike in sorted(paths.items())
    )


def _options(group: DealtGroup) -> Column:
    """Return the holder of each box that writes it when all begin at some turn: `[num_turns, num_boxes]`."""
    made = group.patterns
    turns = np.arange(made.num_copies.max())[:, None]
    hosts: Column = group.host[made.first_row + (turns + made.place) % made.num_copies]
    return hosts
