"""Dealing equal boxes over hosts: neighbours first, until each has its fair share of the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.ids import HostId


class Spread:
    """Bytes given to each host so far, and the choice of who takes the next ones.

    `hosts` are sorted; hosts are then named by their index in it. Until `fair_nbytes` a host is not full.
    """

    __slots__ = ("_fair_nbytes", "_load", "_slice_hosts", "_slices")

    def __init__(self, hosts: Sequence[HostId], *, fair_nbytes: int) -> None:
        self._fair_nbytes = fair_nbytes
        self._load = [0] * len(hosts)
        self._slices = [host.slice_index for host in hosts]
        self._slice_hosts: dict[int, list[int]] = {}
        for index, slice_index in enumerate(self._slices):
            self._slice_hosts.setdefault(slice_index, []).append(index)

    def place(
        self, owners: Sequence[int], num_copies: int, nbytes: int, num_boxes: int, pool_nbytes: int
    ) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yield (hosts, start, stop): who takes a copy of boxes `start` to `stop` of `num_boxes` equal ones.

        Each box goes to `num_copies` hosts on as many slices, none of them a slice of `owners`. `nbytes` is
        the size of one; `pool_nbytes` the bytes of all copies still to place for these owners, which tells
        how high those hosts must be filled when they are few.
        """
        order = self._ring(owners)
        loads = [self._load[host] for ring in order for host in ring]
        level = max(self._fair_nbytes, -(-(sum(loads) + pool_nbytes) // len(loads)))
        start = 0
        while start < num_boxes:
            keepers = self._keepers(order, level)[:num_copies]
            if len(keepers) < num_copies:
                # Too few slices are below the level: it rises to what the emptiest of them need.
                emptiest = sorted(min(self._load[host] for host in ring) for ring in order)
                level = emptiest[num_copies - 1] + max(1, pool_nbytes // len(loads))
                keepers = self._keepers(order, level)[:num_copies]
            room = min(level - self._load[keeper] for keeper in keepers)
            stop = min(num_boxes, start + max(1, -(-room // nbytes))) if nbytes else num_boxes
            for keeper in keepers:
                self._load[keeper] += nbytes * (stop - start)
            pool_nbytes -= nbytes * (stop - start) * num_copies
            yield tuple(keepers), start, stop
            start = stop

    def _ring(self, owners: Sequence[int]) -> list[list[int]]:
        """Return the hosts that may keep what `owners` have, a list a slice, the next slice first."""
        names = list(self._slice_hosts)
        last = owners[-1]
        slice_index = self._slices[last]
        place = self._slice_hosts[slice_index].index(last)
        begin = names.index(slice_index) + 1
        taken = {self._slices[owner] for owner in owners}
        order: list[list[int]] = []
        for name in names[begin:] + names[:begin]:
            if name not in taken:
                members = self._slice_hosts[name]
                turn = place % len(members)
                order.append(members[turn:] + members[:turn])
        return order

    def _keepers(self, order: list[list[int]], level: int) -> list[int]:
        """Return the first host below `level` of each slice that has one."""
        below = ((host for host in ring if self._load[host] < level) for ring in order)
        return [host for host in (next(hosts, None) for hosts in below) if host is not None]
