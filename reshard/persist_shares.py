"""Which host writes which shard of a snapshot to the persistent tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from reshard.boxes import Box
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout

Shard = tuple[str, Box]


def persist_shares(
    layout: Layout, captured: Mapping[HostId, Iterable[Shard]]
) -> dict[HostId, tuple[Shard, ...]]:
    """Return the (path, box) shards each host writes, sorted; every host of `captured` has an entry.

    Each distinct shard goes to exactly one of the hosts that captured it: those without a choice first,
    then the largest, always to the host with the fewest bytes so far. A pure function of its arguments,
    whatever their order. Raises `UsageError` for an array that the layout does not have.
    """
    arrays = {array.path: array for array in layout.arrays}
    owners: defaultdict[Shard, set[HostId]] = defaultdict(set)
    for host, shards in captured.items():
        for shard in shards:
            owners[shard].add(host)
    work: list[tuple[bool, int, Shard]] = []
    for (path, box), hosts in owners.items():
        if path not in arrays:
            raise UsageError(f"a shard of {path!r}, which the layout does not have", path=path)
        work.append((len(hosts) > 1, -arrays[path].box_nbytes(box), (path, box)))
    load: dict[HostId, tuple[int, int]] = dict.fromkeys(sorted(captured), (0, 0))
    chosen: dict[HostId, list[Shard]] = {host: [] for host in load}
    for _, minus_nbytes, shard in sorted(work):
        host = min(owners[shard], key=lambda host: (load[host], host))
        load[host] = (load[host][0] - minus_nbytes, load[host][1] + 1)
        chosen[host].append(shard)
    return {host: tuple(sorted(shards)) for host, shards in chosen.items()}
