"""The capture policy: which host keeps a copy of which shard, so that a lost slice loses nothing.

State that several slices hold needs no network copy: each slice captures a share, and the share shrinks
as slices grow. State that one slice holds alone is captured there, and the agent must push it to a buddy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from reshard.boxes import Box
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout

Shard = tuple[str, Box]
_Load = tuple[int, int]


def captures(layout: Layout, replicas: int = 2) -> dict[HostId, tuple[Shard, ...]]:
    """Return the (path, box) shards each host captures, sorted; every host of the mesh has an entry.

    Each distinct box goes to min(`replicas`, slices that hold it) different slices, to one host in each.
    Boxes without a choice are placed first, then the largest, always on the hosts with the fewest bytes so
    far, so that shares come out even. A pure function: every host computes the same answer. Raises
    `UsageError` when `replicas` is below 1.
    """
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1, got {replicas}", replicas=replicas)
    load: dict[HostId, _Load] = dict.fromkeys(layout.mesh.distinct_hosts(), (0, 0))
    chosen: dict[HostId, list[Shard]] = {host: [] for host in load}
    for has_choice, minus_nbytes, shard, owners in sorted(_candidates(layout, replicas)):
        del has_choice  # only orders the work: boxes without a choice first, so that the others even out
        for host in _least_loaded_per_slice(owners, load)[:replicas]:
            load[host] = (load[host][0] - minus_nbytes, load[host][1] + 1)
            chosen[host].append(shard)
    return {host: tuple(sorted(shards)) for host, shards in chosen.items()}


def _candidates(layout: Layout, replicas: int) -> Iterator[tuple[bool, int, Shard, list[HostId]]]:
    for array in layout.arrays:
        for box, owners in _owners(layout, array).items():
            num_slices = len({host.slice_index for host in owners})
            has_choice = len(owners) > num_slices or num_slices > replicas
            yield has_choice, -array.box_nbytes(box), (array.path, box), owners


def _least_loaded_per_slice(hosts: Iterable[HostId], load: dict[HostId, _Load]) -> list[HostId]:
    """Return the least loaded candidate of each slice, the least loaded slice first."""
    best: dict[int, HostId] = {}
    for host in sorted(hosts, key=lambda host: (load[host], host)):
        best.setdefault(host.slice_index, host)
    return list(best.values())


def _owners(layout: Layout, array: ArrayLayout) -> dict[Box, list[HostId]]:
    owners: defaultdict[Box, list[HostId]] = defaultdict(list)
    for host, boxes in layout.boxes_by_host(array).items():
        for box in boxes:
            owners[box].append(host)
    return owners
