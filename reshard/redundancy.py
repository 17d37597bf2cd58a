"""The redundancy policy: which host keeps a copy of which shard, so that a lost slice loses nothing.

State that several slices hold needs no network copy: each slice captures a share, and the share shrinks
as slices grow. What fewer slices hold than copies are wanted, buddies on other slices pull over the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.boxes import Box, format_box
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from reshard.spread import Spread

Shard = tuple[str, Box]


class BuddyCopy(NamedTuple):
    """One shard that a host keeps for others: it pulls the box from the first of `sources` that answers.

    `sources` are the hosts that capture the box, the one to ask first in front; never empty.
    """

    path: str
    box: Box
    sources: tuple[HostId, ...]


def captures(layout: Layout, replicas: int = 2) -> dict[HostId, tuple[Shard, ...]]:
    """Return the (path, box) shards each host captures, sorted; every host of the mesh has an entry.

    Each distinct box goes to min(`replicas`, slices that hold it) different slices, to one host in each.
    Boxes without a choice are placed first, then the largest, always on the hosts with the fewest bytes so
    far, so that shares come out even. A pure function: every host computes the same answer. Raises
    `UsageError` when `replicas` is below 1.
    """
    _check_replicas(replicas)
    hosts = layout.mesh.distinct_hosts()
    slices = [host.slice_index for host in hosts]
    load = [(0, 0)] * len(hosts)
    chosen: list[list[Shard]] = [[] for _ in hosts]
    with_choice: list[tuple[int, Shard, tuple[int, ...]]] = []
    for arrays, owners_by_box in _groups(layout):
        for box, owners in owners_by_box.items():
            nbytes = arrays[0].box_nbytes(box)
            num_slices = len({slices[owner] for owner in owners})
            if len(owners) > num_slices or num_slices > replicas:
                with_choice.extend((-nbytes, (array.path, box), owners) for array in arrays)
                continue
            shards = [(array.path, box) for array in arrays]
            for owner in owners:
                load[owner] = (load[owner][0] + nbytes * len(shards), load[owner][1] + len(shards))
                chosen[owner].extend(shards)
    for minus_nbytes, shard, owners in sorted(with_choice):
        for owner in _least_loaded_per_slice(owners, load, slices)[:replicas]:
            load[owner] = (load[owner][0] - minus_nbytes, load[owner][1] + 1)
            chosen[owner].append(shard)
    return {host: tuple(sorted(shards)) for host, shards in zip(hosts, chosen, strict=True)}


def buddies(
    layout: Layout, captured: Mapping[HostId, Iterable[Shard]], replicas: int = 2
) -> dict[HostId, tuple[BuddyCopy, ...]]:
    """Return what each host must pull from others, sorted, so that `replicas` slices have each box.

    `captured` is the answer of `captures` for the same layout and replicas. Only boxes that fewer than
    `replicas` slices hold need it: buddies are on slices without the box, no two on one slice, and when
    there are fewer slices than `replicas`, each slice ends with the box. A host's boxes go to the same
    place in the next slices, in a ring, until a buddy has its fair share of the bytes (the mean over hosts,
    or over those the box may go to): so a host pulls from few, and at most one box more than that share.
    Every host of the mesh has an entry. A pure function. Raises `UsageError` when `replicas` is below 1, or
    when `captured` does not have a box that several hosts of a slice could have captured.
    """
    _check_replicas(replicas)
    hosts = layout.mesh.distinct_hosts()
    slices = [host.slice_index for host in hosts]
    wanted = min(replicas, len(set(slices)))
    pools = _short_of_copies(layout, captured, hosts, wanted)
    total = sum(
        (wanted - len(takers)) * nbytes * len(shards)
        for takers, by_nbytes in pools.items()
        for nbytes, shards in by_nbytes.items()
    )
    spread = Spread(hosts, fair_nbytes=-(-total // len(hosts)))
    kept: list[list[BuddyCopy]] = [[] for _ in hosts]
    for takers, by_nbytes in sorted(pools.items()):
        turns = [tuple(hosts[t] for t in takers[turn:] + takers[:turn]) for turn in range(len(takers))]
        num_copies = wanted - len(takers)
        pool_nbytes = num_copies * sum(nbytes * len(shards) for nbytes, shards in by_nbytes.items())
        first = 0
        for nbytes, shards in sorted(by_nbytes.items(), reverse=True):
            copies = [
                BuddyCopy(path, box, turns[index % len(turns)])
                for index, (path, box) in enumerate(sorted(shards), start=first)
            ]
            first += len(copies)
            for keepers, start, stop in spread.place(takers, num_copies, nbytes, len(copies), pool_nbytes):
                for keeper in keepers:
                    kept[keeper].extend(copies[start:stop])
            pool_nbytes -= num_copies * nbytes * len(copies)
    return {host: tuple(sorted(copies)) for host, copies in zip(hosts, kept, strict=True)}


def _check_replicas(replicas: int) -> None:
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1, got {replicas}", replicas=replicas)


def _groups(layout: Layout) -> Iterator[tuple[list[ArrayLayout], dict[Box, tuple[int, ...]]]]:
    """Yield arrays of one shape, spec and itemsize together, with the indices of the hosts of each box."""
    alike: defaultdict[object, list[ArrayLayout]] = defaultdict(list)
    for array in layout.arrays:
        alike[array.shape, array.spec, array.itemsize].append(array)
    for arrays in alike.values():
        owners: defaultdict[Box, list[int]] = defaultdict(list)
        for index, boxes in enumerate(layout.boxes_by_host(arrays[0]).values()):
            for box in boxes:
                owners[box].append(index)
        yield arrays, {box: tuple(indices) for box, indices in owners.items()}


def _least_loaded_per_slice(
    owners: Iterable[int], load: Sequence[tuple[int, int]], slices: Sequence[int]
) -> list[int]:
    """Return the least loaded candidate of each slice, the least loaded slice first."""
    best: dict[int, int] = {}
    for owner in sorted(owners, key=load.__getitem__):
        best.setdefault(slices[owner], owner)
    return list(best.values())


def _short_of_copies(
    layout: Layout, captured: Mapping[HostId, Iterable[Shard]], hosts: Sequence[HostId], wanted: int
) -> dict[tuple[int, ...], dict[int, list[Shard]]]:
    """Return the boxes that too few slices hold, by the hosts that capture them and their size in bytes."""
    slices = [host.slice_index for host in hosts]
    pools: defaultdict[tuple[int, ...], defaultdict[int, list[Shard]]] = defaultdict(
        lambda: defaultdict(list)
    )
    unsettled: dict[Shard, int] = {}
    for arrays, owners_by_box in _groups(layout):
        for box, owners in owners_by_box.items():
            num_slices = len({slices[owner] for owner in owners})
            if num_slices >= wanted:
                continue
            nbytes = arrays[0].box_nbytes(box)
            if len(owners) == num_slices:  # one host a slice has it, so `captures` had no choice
                pools[owners][nbytes].extend([(array.path, box) for array in arrays])
            else:
                unsettled.update(((array.path, box), nbytes) for array in arrays)
    for shard, takers in _takers(captured, hosts, unsettled).items():
        pools[takers][unsettled[shard]].append(shard)
    return {takers: dict(by_nbytes) for takers, by_nbytes in pools.items()}


def _takers(
    captured: Mapping[HostId, Iterable[Shard]], hosts: Sequence[HostId], shards: Iterable[Shard]
) -> dict[Shard, tuple[int, ...]]:
    """Return the indices of the hosts that capture each of `shards`."""
    takers: dict[Shard, tuple[int, ...]] = dict.fromkeys(shards, ())
    if takers:
        for index, host in enumerate(hosts):
            for shard in captured.get(host, ()):
                if shard in takers:
                    takers[shard] += (index,)
    for (path, box), taken_by in takers.items():
        if not taken_by:
            raise UsageError(f"no host captures box {format_box(box)} of {path!r}", path=path, box=box)
    return takers
