"""Which source sends which piece: even shares, in few and long runs.

All demands on one pool of sources (the hosts that could send them) are put in a row, target by target, and
the row is cut where one source's share ends and the next one's begins. So a target has few sources, and at
most one array less than the number of sources is cut in a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from reshard.balance import ByteShares, even_shares
from reshard.grid import Column
from reshard.pattern import Pattern
from reshard.plan_rows import Rows
from reshard.runs import Runs

EVEN_WITHIN = 0.04
"""By so much of the mean load a source's may grow for the sake of whole demands: in each of its pools by half
of one where its run begins, and half of one where it ends."""

_Point = tuple[int, int, int]
"""A place in a row of demands: (demand, array, elements of its cut dim)."""


def assign(patterns: Sequence[Pattern], num_hosts: int, *, min_cut_bytes: int) -> list[Rows]:
    """Return the rows of each pattern: local pieces, and one source for every part of the others.

    No array is cut into a part smaller than `min_cut_bytes`.
    """
    demands = _Demands.of(patterns)
    shares = even_shares(demands.pools, demands.pool_bytes, num_hosts)
    source = np.zeros(len(demands.row), np.int64)  # which of its pool's hosts sends it, if it is not split
    is_split = np.zeros(len(demands.row), bool)
    parts: list[list[_Part]] = [[] for _ in patterns]
    begins = np.searchsorted(demands.pool, np.arange(len(demands.pools) + 1))
    for pool in np.flatnonzero(demands.pools.lengths > 1).tolist():
        share = shares[demands.pools.begin[pool] : demands.pools.begin[pool + 1]]
        start, stop = int(begins[pool]), int(begins[pool + 1])
        points = _split_points(demands, patterns, start, stop, share, min_cut_bytes)
        for place, (begin, end) in enumerate(pairwise(points)):
            first_whole = begin[0] + (begin[1:] != (0, 0))
            source[first_whole : end[0]] = place
            for demand, of_demand in _partial(begin, end, demands, patterns):
                is_split[demand] = True
                part = (int(demands.row[demand]), place, *of_demand)
                parts[demands.pattern[demand]].append(part)
    whole = np.flatnonzero(~is_split)
    whole = whole[np.argsort(demands.pattern[whole], kind="stable")]
    ends = np.searchsorted(demands.pattern[whole], np.arange(len(patterns)), side="right")
    of_pattern = np.split(whole, ends[:-1])
    return [
        _rows(pattern, demands.row[of_pattern[number]], source[of_pattern[number]], parts[number])
        for number, pattern in enumerate(patterns)
    ]


_Part = tuple[int, int, int, int, int, int]
"""(row, place of the source in its pool, first array, stop, cut start, cut stop)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Demands:
    """Pieces that come over the network, `[n]` each, by pool, then target: which pattern's which row."""

    pattern: Column
    row: Column
    pool: Column
    nbytes: Column
    pools: Runs
    pool_bytes: Column
    small_bytes: float
    """A demand up to this size goes to one source whole, so loads differ by `EVEN_WITHIN` at most."""

    @classmethod
    def of(cls, patterns: Sequence[Pattern]) -> _Demands:
        options = [pattern.match.options for pattern in patterns]
        lengths = np.concatenate([np.zeros(0, np.int64), *(runs.lengths for runs in options)])
        hosts = np.concatenate([np.zeros((0, 1), np.int64), *(runs.values[:, :1] for runs in options)])
        pools, pool_of = Runs.of(lengths, hosts).distinct()
        first_option = np.cumsum([0, *map(len, options)])
        columns: list[Column] = [np.zeros((5, 0), np.int64)]
        for number, pattern in enumerate(patterns):
            rows = np.flatnonzero(pattern.match.option >= 0)
            pool = pool_of[first_option[number] + pattern.match.option[rows]]
            target = pattern.match.target[rows]
            columns.append(np.stack((pool, target, np.full(len(rows), number), rows, pattern.nbytes[rows])))
        pool, target, pattern_number, row, nbytes = np.concatenate(columns, axis=1)
        order = np.lexsort((row, pattern_number, target, pool))
        pool_bytes = np.zeros(len(pools), np.int64)
        np.add.at(pool_bytes, pool, nbytes)
        sources, num_pools = np.unique(pools.values, return_counts=True)
        mean_bytes = float(pool_bytes.sum()) / max(len(sources), 1)
        return cls(
            pattern=pattern_number[order],
            row=row[order],
            pool=pool[order],
            nbytes=nbytes[order],
            pools=pools,
            pool_bytes=pool_bytes,
            small_bytes=EVEN_WITHIN * mean_bytes / int(num_pools.max(initial=1)),
        )


def _split_points(
    demands: _Demands,
    patterns: Sequence[Pattern],
    start: int,
    stop: int,
    share: ByteShares,
    min_cut_bytes: int,
) -> list[_Point]:
    """Return where each source's run begins among demands `start` to `stop`, and where the last one ends."""
    nbytes = demands.nbytes[start:stop]
    ends = nbytes.cumsum()
    offsets = share.cumsum()[:-1]
    points: list[_Point] = [(start, 0, 0)]
    for offset, at in zip(offsets.tolist(), ends.searchsorted(offsets, side="right").tolist(), strict=True):
        if at >= len(ends):
            points.append((stop, 0, 0))
            continue
        demand, size = start + at, int(nbytes[at])
        within = offset - (int(ends[at]) - size)
        if size <= demands.small_bytes:
            points.append((demand + (2 * within >= size), 0, 0))
            continue
        pattern = patterns[demands.pattern[demand]]
        array, cut = pattern.place(int(demands.row[demand]), within, min_cut_bytes)
        points.append((demand + 1, 0, 0) if array == pattern.num_arrays else (demand, array, cut))
    points.append((stop, 0, 0))
    return points


def _partial(
    begin: _Point, end: _Point, demands: _Demands, patterns: Sequence[Pattern]
) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Yield (demand, (first array, stop, cut start, cut stop)) for the parts of split demands in a run."""
    if begin[0] == end[0]:
        yield from ((begin[0], part) for part in _array_parts(begin[1:], end[1:], begin, demands, patterns))
        return
    if begin[1:] != (0, 0):
        num_arrays = patterns[demands.pattern[begin[0]]].num_arrays
        for part in _array_parts(begin[1:], (num_arrays, 0), begin, demands, patterns):
            yield begin[0], part
    if end[1:] != (0, 0):
        for part in _array_parts((0, 0), end[1:], end, demands, patterns):
            yield end[0], part


def _array_parts(
    begin: tuple[int, int],
    end: tuple[int, int],
    point: _Point,
    demands: _Demands,
    patterns: Sequence[Pattern],
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first array, stop, cut start, cut stop) from `begin` to `end`, each (array, elements)."""
    (first, first_cut), (last, last_cut) = begin, end
    if first == last:
        if last_cut > first_cut:
            yield first, first + 1, first_cut, last_cut
        return
    if first_cut:
        pattern = patterns[demands.pattern[point[0]]]
        yield first, first + 1, first_cut, pattern.cut_length(int(demands.row[point[0]]), first)
        first += 1
    if first < last:
        yield first, last, 0, 0
    if last_cut:
        yield last, last + 1, 0, last_cut


def _rows(pattern: Pattern, whole: Column, place: Column, parts: Sequence[_Part]) -> Rows:
    """Return a pattern's rows: its local pieces, demands from one source, and parts of split ones."""
    match, num_arrays = pattern.match, pattern.num_arrays
    local = np.flatnonzero(match.option < 0)
    split = np.array(parts, np.int64).reshape(-1, 6).T
    remote = np.concatenate((whole, split[0]))
    in_pool = np.concatenate((place, split[1]))
    host, box, tier = match.options.values[match.options.begin[match.option[remote]] + in_pool].T
    row = np.concatenate((local, remote))
    whole_arrays = np.tile([[0], [num_arrays], [0], [0]], len(local) + len(whole))
    first, stop, cut_start, cut_stop = np.concatenate((whole_arrays, split[2:]), axis=1)
    return Rows(
        target=match.target[row],
        source=np.concatenate((match.target[local], host)),
        tier=np.concatenate((match.own_tier[local], tier)),
        piece=row,
        target_box=match.target_box[row],
        source_box=np.concatenate((match.own_box[local], box)),
        first=first,
        stop=stop,
        cut_start=cut_start,
        cut_stop=cut_stop,
    )
