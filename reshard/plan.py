"""A plan: what gives every host its part of a state, with its sums, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from reshard.errors import InvariantBrokenError, UsageError
from reshard.grid import Column
from reshard.holdings import TIERS, Tier
from reshard.ids import HostId
from reshard.plan_rows import PlanGroup
from reshard.plan_text import describe_routes, from_json, to_json
from reshard.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What gives every target host its boxes of the state at `step`.

    `bytes_moved` cross the network, `bytes_local` do not; of these, `bytes_reused` are whole boxes that the
    target has already and needs no copy of. `bytes_lower_bound` is what no plan can move less than: the bytes
    that a target host needs and does not hold. Two plans are equal when their JSON is. Raises `UsageError`
    for a row that does not fit, `InvariantBrokenError` when more is moved than the lower bound.
    """

    step: int
    hosts: tuple[HostId, ...]
    groups: tuple[PlanGroup, ...]
    bytes_lower_bound: int
    bytes_moved: int = field(init=False)
    bytes_local: int = field(init=False)
    bytes_reused: int = field(init=False)

    def __post_init__(self) -> None:
        for group in self.groups:
            if max(group.rows.target.max(initial=-1), group.rows.source.max(initial=-1)) >= len(self.hosts):
                raise UsageError("a row of the plan names a host that the plan does not have")
        local = sum(int(group.nbytes[group.rows.is_local()].sum()) for group in self.groups)
        moved = sum(int(group.nbytes.sum()) for group in self.groups) - local
        reused = sum(int(group.nbytes[group.is_reused()].sum()) for group in self.groups)
        for name, value in (("bytes_moved", moved), ("bytes_local", local), ("bytes_reused", reused)):
            object.__setattr__(self, name, value)
        if moved != self.bytes_lower_bound:
            raise InvariantBrokenError(
                f"the plan moves {moved} bytes, the lower bound is {self.bytes_lower_bound}", step=self.step
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def empty(cls, step: int) -> Plan:
        """Return the plan that moves nothing."""
        return cls(step=step, hosts=(), groups=(), bytes_lower_bound=0)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, sorted: an object for each, so for small plans only."""
        return _sorted(
            transfer
            for group in self.groups
            for transfer in group.transfers(np.arange(len(group.nbytes)), self.hosts)
        )

    def for_target(self, host: HostId) -> tuple[Transfer, ...]:
        """Return the transfers into one host, local ones included, sorted."""
        if host not in self.hosts:
            return ()
        index = self.hosts.index(host)
        return _sorted(
            transfer
            for group in self.groups
            for transfer in group.transfers(np.flatnonzero(group.rows.target == index), self.hosts)
        )

    def rounds(self, max_bytes: int) -> tuple[tuple[str, ...], ...]:
        """Return the paths of all arrays with elements, in rounds to be carried out one after the other.

        The boxes of a round's arrays take at most `max_bytes` on any host; an array that alone takes more is
        a round of its own. Raises `UsageError` unless `max_bytes` is positive.
        """
        if max_bytes < 1:
            raise UsageError(f"a round needs at least a byte, got {max_bytes}")
        rounds: list[list[str]] = []
        room = 0
        for path, nbytes in sorted(self._most_host_bytes().items()):
            if not rounds or nbytes > room:
                rounds.append([])
                room = max_bytes
            rounds[-1].append(path)
            room -= nbytes
        return tuple(map(tuple, rounds))

    def bytes_sent(self) -> dict[HostId, int]:
        """Return the network bytes each source sends; hosts that send nothing are absent."""
        return self._network_bytes([group.rows.source for group in self.groups])

    def bytes_received(self) -> dict[HostId, int]:
        """Return the network bytes each target receives; hosts that receive nothing are absent."""
        return self._network_bytes([group.rows.target for group in self.groups])

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes, local and moved, that come from each tier used."""
        by_tier = np.zeros(len(TIERS), np.int64)
        for group in self.groups:
            np.add.at(by_tier, group.rows.tier, group.nbytes)
        return {TIERS[tier]: int(by_tier[tier]) for tier in np.flatnonzero(by_tier).tolist()}

    def to_json(self) -> bytes:
        """Return the plan as one JSON object that `from_json` reads."""
        return to_json(self.step, self.hosts, self.groups, self.bytes_lower_bound)

    @classmethod
    def from_json(cls, data: bytes | str) -> Plan:
        """Read what `to_json` wrote; raises `UsageError` naming the first thing that does not fit."""
        step, hosts, groups, bytes_lower_bound = from_json(data)
        return cls(step=step, hosts=hosts, groups=groups, bytes_lower_bound=bytes_lower_bound)

    def table(self, max_routes: int = 200) -> str:
        """Return the plan as text: a line for each target, source and tier, then the totals in bytes.

        Beyond `max_routes` only the routes with the most bytes are shown, and the others counted.
        """
        totals = (
            f"step {self.step}: {self.bytes_moved:,} bytes over the network "
            f"(lower bound {self.bytes_lower_bound:,}), {self.bytes_local:,} local "
            f"({self.bytes_reused:,} need no copy)"
        )
        return "\n".join([*describe_routes(self.hosts, self.groups, max_routes), totals])

    def _network_bytes(self, columns: Iterable[Column]) -> dict[HostId, int]:
        nbytes = np.zeros(len(self.hosts), np.int64)
        for group, column in zip(self.groups, columns, strict=True):
            remote = ~group.rows.is_local()
            np.add.at(nbytes, column[remote], group.nbytes[remote])
        return {self.hosts[host]: int(nbytes[host]) for host in np.flatnonzero(nbytes).tolist()}

    def _most_host_bytes(self) -> Mapping[str, int]:
        """Return, by path, the most bytes that any host needs of the array."""
        most: dict[str, int] = {}
        for group in self.groups:
            for begin, of_class in group.numbered_classes():
                rows = (group.rows.first <= begin) & (group.rows.stop > begin)
                elements = group.elements(begin, of_class)[rows]
                by_host = np.bincount(group.rows.target[rows], weights=elements)
                nbytes = int(by_host.max(initial=0)) * of_class.itemsize
                most.update(dict.fromkeys(of_class.paths, nbytes))
        return most


def _sorted(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    return tuple(sorted(transfers, key=lambda transfer: transfer.order))
