"""The smallest set of transfers that turns what survived into a target layout.

For every distinct box a target host needs: first what the host holds itself, then, for the elements it
lacks, exactly one remote source each. So network bytes equal the lower bound, whatever the choice of
sources; the choice only evens out what each source sends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from reshard.boxes import Box, BoxIndex, check_box, full_box, intersect, shape_of, subtract, uncovered, volume
from reshard.errors import InvariantBrokenError, MissingShardError
from reshard.holdings import TIERS, Holding, Tier
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from reshard.plan import Plan, Transfer

__all__ = ["Plan", "Transfer", "make_plan"]

DEFAULT_MAX_PIECE_BYTES = 64 << 20
_MIN_SHARE_BYTES = 1 << 20  # below this a further cut costs more in requests than it evens out

_Source = tuple[int, HostId]  # rank of the tier, host: sorts nearest first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """Elements a target host lacks, all within one source box, and the hosts that could send them."""

    array: ArrayLayout
    target: HostId
    target_box: Box
    source_box: Box
    piece: Box
    sources: tuple[_Source, ...]

    @property
    def order(self) -> tuple[bool, int, HostId, str, Box]:
        """Demands without a choice first, then the largest: what is left then evens out the loads."""
        nbytes = self.array.box_nbytes(self.piece)
        return len(self.sources) > 1, -nbytes, self.target, self.array.path, self.piece

    def sent_by(self, source: _Source) -> Transfer:
        rank, host = source
        return Transfer(
            path=self.array.path,
            source=host,
            target=self.target,
            source_box=self.source_box,
            piece=self.piece,
            target_box=self.target_box,
            nbytes=self.array.box_nbytes(self.piece),
            tier=TIERS[rank],
        )


def make_plan(
    layout: Layout,
    holdings: Iterable[Holding],
    *,
    step: int,
    lost: Iterable[HostId] = (),
    max_piece_bytes: int = DEFAULT_MAX_PIECE_BYTES,
) -> Plan:
    """Return the plan that gives every host of `layout` its boxes of the state at `step`.

    Holdings of other steps and of arrays the layout lacks are ignored; a nearer tier is preferred, first
    on the target host itself, then memory before the persistent tier among remote hosts. Network transfers
    are cut to at most `max_piece_bytes` (one element at least), and smaller where that evens out what the
    sources send. Equal inputs in any order give an equal plan.

    Raises `MissingShardError`, naming the array and the first missing box, when an element is nowhere:
    the plan is whole or there is none. `lost` only serves that message. Raises `UsageError` for a holding
    outside its array.
    """
    sources = _sources_by_path(layout, holdings, step)
    transfers: list[Transfer] = []
    demands: list[_Demand] = []
    bytes_lacking = 0
    for array in layout.arrays:
        stock = _Stock(sources[array.path])
        for target, boxes in layout.boxes_by_host(array).items():
            for target_box in boxes:
                lacking = [target_box] if volume(target_box) else []
                for demand in stock.local(array, target, target_box, lacking):
                    transfers.append(demand.sent_by(demand.sources[0]))
                bytes_lacking += sum(array.box_nbytes(region) for region in lacking)
                demands.extend(stock.remote(array, target, target_box, lacking))
                if lacking:
                    gone = uncovered(full_box(array.shape), sources[array.path])
                    raise MissingShardError(array.path, gone[0], step, lost=lost)
    transfers.extend(_assign(_cut_to_share(demands, bytes_lacking, max_piece_bytes)))
    plan = Plan.of(step, transfers, bytes_lower_bound=bytes_lacking)
    if plan.bytes_moved != plan.bytes_lower_bound:
        raise InvariantBrokenError(
            f"the plan moves {plan.bytes_moved} bytes, the lower bound is {plan.bytes_lower_bound}", step=step
        )
    return plan


class _Stock:
    """The holdings of one array at one step, searchable by region."""

    def __init__(self, sources: dict[Box, tuple[_Source, ...]]) -> None:
        self._sources = sources
        self._everywhere = BoxIndex(sources)
        by_host: defaultdict[HostId, list[tuple[int, Box]]] = defaultdict(list)
        for box, ranked in sources.items():
            for rank, host in ranked:
                by_host[host].append((rank, box))
        self._by_host = {host: sorted(held) for host, held in by_host.items()}

    def local(
        self, array: ArrayLayout, target: HostId, target_box: Box, lacking: list[Box]
    ) -> Iterator[_Demand]:
        """Yield what the target holds itself, nearest tier first; takes it out of `lacking`."""
        for rank, box in self._by_host.get(target, ()):
            for piece in _take(lacking, box):
                yield _Demand(
                    array=array,
                    target=target,
                    target_box=target_box,
                    source_box=box,
                    piece=piece,
                    sources=((rank, target),),
                )

    def remote(
        self, array: ArrayLayout, target: HostId, target_box: Box, lacking: list[Box]
    ) -> Iterator[_Demand]:
        """Yield what other hosts hold of the rest, in memory before persistent; takes it out of `lacking`."""
        persistent_rank = TIERS.index("persistent")
        candidates = {box for region in lacking for box in self._everywhere.overlapping(region)}
        for box in sorted(candidates, key=lambda box: (self._sources[box][0][0] == persistent_rank, box)):
            nearest = self._sources[box][0][0]
            # Host memories are equally far over the network; only the persistent tier is farther.
            usable = tuple(
                s for s in self._sources[box] if s[0] < persistent_rank or nearest == persistent_rank
            )
            for piece in _take(lacking, box):
                yield _Demand(
                    array=array,
                    target=target,
                    target_box=target_box,
                    source_box=box,
                    piece=piece,
                    sources=usable,
                )


def _take(lacking: list[Box], box: Box) -> list[Box]:
    """Return the parts of `lacking` inside `box`, and leave only the rest in it."""
    taken = [piece for region in lacking if (piece := intersect(region, box)) is not None]
    if taken:
        lacking[:] = [rest for region in lacking for rest in subtract(region, box)]
    return taken


def _sources_by_path(
    layout: Layout, holdings: Iterable[Holding], step: int
) -> dict[str, dict[Box, tuple[_Source, ...]]]:
    """Return path → box → the hosts that hold it, each once with its nearest tier, nearest first."""
    shapes = {array.path: array.shape for array in layout.arrays}
    rank_of: dict[str, dict[Box, dict[HostId, int]]] = {path: {} for path in shapes}
    tier_rank: dict[Tier, int] = {tier: rank for rank, tier in enumerate(TIERS)}
    for holding in holdings:
        if holding.step != step or holding.path not in shapes:
            continue
        check_box(holding.box, shapes[holding.path])
        ranks = rank_of[holding.path].setdefault(holding.box, {})
        ranks[holding.host] = min(tier_rank[holding.tier], ranks.get(holding.host, len(TIERS)))
    return {
        path: {box: tuple(sorted((r, h) for h, r in ranks.items())) for box, ranks in sorted(boxes.items())}
        for path, boxes in rank_of.items()
    }


def _cut_to_share(demands: list[_Demand], num_bytes: int, max_piece_bytes: int) -> Iterator[_Demand]:
    """Yield the demands, cut so finely that no piece is a large part of what a source sends."""
    num_sources = len({host for demand in demands for _, host in demand.sources})
    fair_bytes = max(_MIN_SHARE_BYTES, num_bytes // (4 * max(num_sources, 1)))
    for demand in demands:
        yield from _cut(demand, min(max_piece_bytes, fair_bytes))


def _cut(demand: _Demand, max_bytes: int) -> Iterator[_Demand]:
    """Yield the demand in pieces of at most `max_bytes`, or of one element; early dims are halved first."""
    pending = [demand]
    while pending:
        current = pending.pop()
        dim = next((dim for dim, length in enumerate(shape_of(current.piece)) if length > 1), None)
        if dim is None or current.array.box_nbytes(current.piece) <= max_bytes:
            yield current
            continue
        start, stop = current.piece[dim]
        middle = (start + stop) // 2
        for half in ((start, middle), (middle, stop)):
            piece = (*current.piece[:dim], half, *current.piece[dim + 1 :])
            pending.append(replace(current, piece=piece))


def _assign(demands: Iterable[_Demand]) -> Iterator[Transfer]:
    """Yield each demand's transfer from the candidate that has the least to send so far."""
    bytes_to_send: Counter[HostId] = Counter()
    for demand in sorted(demands, key=lambda demand: demand.order):
        source = min(demand.sources, key=lambda source: (bytes_to_send[source[1]], source))
        transfer = demand.sent_by(source)
        bytes_to_send[transfer.source] += transfer.nbytes
        yield transfer
