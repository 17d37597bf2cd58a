"""The ways in which the copies of an array can be placed, as columns: one set for arrays partitioned alike.

Boxes with the same holders are a *pool*. A pool's copies go round the slices that hold it like cards round a
table: copy after copy, box after box, the next array where the last one stopped. After some arrays the round
is back at its beginning; so many *patterns* there are, and over all of them every holder has equally much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reshard.grid import BoxTable, Column, placement, slice_column
from reshard.layout import Spec
from reshard.mesh import MeshLayout

MAX_PATTERNS = 256
"""Where pools differ so much that all their rounds meet again only after more, they need not meet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patterns:
    """How copies of arrays of one partition can be placed: row i is a copy of box `box[i]`, `[n]`, ascending.

    `host` has the host of each row, an index into the mesh's `distinct_hosts()`, for each pattern:
    `[num_patterns, n]`. The rows of one box are on different slices. `first_row`, `num_copies`, `num_slices`
    (that hold the box) and `place` (among the boxes of its pool) have one entry a box of `table`.
    """

    table: BoxTable
    box: Column
    host: Column
    first_row: Column
    num_copies: Column
    num_slices: Column
    place: Column

    @property
    def num_patterns(self) -> int:
        """The number of patterns."""
        return len(self.host)


@lru_cache(maxsize=4)
def slice_numbers(mesh: MeshLayout) -> tuple[Column, Column]:
    """Return the slice of each of the mesh's `distinct_hosts()`, counted from 0, and its place in it."""
    indices = slice_column(mesh.distinct_hosts())
    _, first, number = np.unique(indices, return_index=True, return_inverse=True)
    return number, np.arange(len(indices)) - first[number]


def patterns(mesh: MeshLayout, spec: Spec, replicas: int, num_arrays: int) -> Patterns:
    """Return how to place min(`replicas`, slices that hold it) copies of each box of arrays with this spec.

    There are no more patterns than `num_arrays`.
    """
    placed = placement(mesh, spec)
    order = np.lexsort((placed.host, placed.box))
    table, host, box = placed.table, placed.host[order], placed.box[order]
    slice_of, _ = slice_numbers(mesh)
    is_next = np.ones(len(host), bool)
    is_next[1:] = (box[1:] != box[:-1]) | (slice_of[host[1:]] != slice_of[host[:-1]])
    run = np.flatnonzero(is_next)  # a run: the hosts of one slice that hold one box
    run_length = np.diff(run, append=len(host))
    num_slices = np.bincount(box[run], minlength=len(table.low))
    first_run = np.cumsum(num_slices) - num_slices
    num_hosts = np.maximum.reduceat(run_length, first_run)  # of a slice, that hold the box
    place, num_boxes = _places(host, box, len(table.low))
    copies = np.minimum(num_slices, replicas)
    # Every so many copies each holder has had equally many. Where the copies of a box would always fall on
    # the same slices, the next round begins one slice later: else what one slice loses only another one has.
    pairs_up = (num_slices % copies == 0) & (copies > 1) & (copies < num_slices)
    once_round = num_slices * num_hosts
    whole = once_round * (1 + pairs_up)
    num_patterns = _common_period(whole // np.gcd(whole, num_boxes * copies), num_arrays)

    first_row = np.cumsum(copies) - copies
    row_box = np.repeat(np.arange(len(copies)), copies)
    copy = np.arange(len(row_box)) - first_row[row_box]
    turn = (np.arange(num_patterns)[:, None] * num_boxes[row_box] + place[row_box]) * copies[row_box] + copy
    slices = num_slices[row_box]
    later = np.where(pairs_up[row_box], turn // once_round[row_box], 0)
    chosen_run = first_run[row_box] + (turn + later) % slices
    chosen = host[run[chosen_run] + turn // slices % run_length[chosen_run]]
    return Patterns(
        table=table,
        box=row_box,
        host=chosen,
        first_row=first_row,
        num_copies=copies,
        num_slices=num_slices,
        place=place,
    )


def _places(host: Column, box: Column, num_boxes: int) -> tuple[Column, Column]:
    """Return each box's place among those with the same holders, and how many these are."""
    ends = np.cumsum(np.bincount(box, minlength=num_boxes)).tolist()
    holders = host.tobytes()
    width = host.itemsize
    pools: dict[bytes, int] = {}
    starts = [0, *ends[:-1]]
    pool = np.array(
        [
            pools.setdefault(holders[width * start : width * end], len(pools))
            for start, end in zip(starts, ends, strict=True)
        ]
    )
    sizes = np.bincount(pool)
    order = np.argsort(pool, kind="stable")
    place = np.empty(num_boxes, np.int64)
    place[order] = np.arange(num_boxes) - (np.cumsum(sizes) - sizes)[pool[order]]
    return place, sizes[pool]


def _common_period(periods: Column, num_arrays: int) -> int:
    distinct: set[int] = set(periods.tolist())
    longest = max(distinct)
    return min(math.lcm(*distinct), max(longest, MAX_PATTERNS), num_arrays)
