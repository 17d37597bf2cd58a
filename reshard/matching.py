"""What each target host needs against what is held: the part of planning that array sizes do not change.

Works in the cells of `reshard.grid`. Every cell a host needs is taken from the host itself where it has it;
for the others the *options* are found: the hosts that could send it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.grid import BoxTable, Column, Placement, cell_table, cells_of, merge_neighbours
from reshard.holdings import TIERS
from reshard.runs import Runs, spread

__all__ = ["MAX_CELLS", "HeldBoxes", "Match", "held_boxes", "match", "num_cells_of"]

PERSISTENT = TIERS.index("persistent")
MAX_CELLS = 1 << 26
"""Of all hosts together: some 6 GB while they are matched. Grids of 131,072 chips make a quarter million."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldBoxes:
    """Holdings in common numbers, `[n]` each: `box` is an index into `table`, `host` one of the plan's."""

    table: BoxTable
    host: Column
    box: Column
    tier: Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """What hosts need, in pieces, `[n]` each; a host's pieces do not overlap and are all that it needs.

    `piece` has the pieces as boxes. Where the target itself has a piece, `own_box` is the box it has it in
    (an index into `held_table`) and `own_tier` the tier; elsewhere both are -1, and `option` is one of the
    runs of `options`: the hosts that could send the piece, the box each has it in and the tier, `[m, 3]`.
    `num_missing` counts needed cells that nobody has; they are in no piece.
    """

    target_table: BoxTable
    held_table: BoxTable
    piece: BoxTable
    target: Column
    target_box: Column
    own_box: Column
    own_tier: Column
    option: Column
    options: Runs
    num_missing: int


def num_cells_of(box: Column, table: BoxTable) -> float:
    """Return how many cells the boxes with these numbers have together, without finding them."""
    of_box = (table.high - table.low).prod(axis=1, dtype=np.float64)
    return float(of_box[box].sum())


def match(
    placed: Placement,
    target_table: BoxTable,
    target_hosts: Column,
    held: HeldBoxes,
    num_cells: Sequence[int],
    slice_of: Column,
    *,
    prefers_own_slice: bool,
) -> Match:
    """Return what the hosts of `placed` need and where it is.

    `target_table` are the boxes of `placed` in the common numbers, `target_hosts[i]` is the plan's number of
    the mesh's host i, and `slice_of` the slice of each host of the plan. On a host that has a cell in
    several boxes the nearest tier counts, then the first box.
    """
    pair, cell = _spread(placed.box, target_table, num_cells)
    target = target_hosts[placed.host[pair]]
    holders = _Holders.of(held, num_cells)
    own = holders.find(target, cell)
    has_own = own >= 0
    wanted = np.flatnonzero(~has_own)
    option, options, is_missing = _options(
        target[wanted], cell[wanted], holders.senders(), slice_of, prefers_own_slice
    )
    # A number for where a cell comes from: neighbours from one place become one piece.
    origin = np.empty(len(pair), np.int64)
    num_own = (len(held.table.low) + 1) * len(TIERS)
    origin[has_own] = holders.box[own[has_own]] * len(TIERS) + holders.tier[own[has_own]]
    origin[wanted] = num_own + option
    kept = np.ones(len(pair), bool)
    kept[wanted[is_missing]] = False
    num_origins = num_own + len(options) + 1
    key, piece = pair[kept] * num_origins + origin[kept], cell_table(cell[kept], num_cells)
    if len(pair) > len(placed.box):  # some box has several cells
        key, piece = merge_neighbours(key, piece)
    pair, origin = np.divmod(key, num_origins)
    is_own = origin < num_own
    return Match(
        target_table=target_table,
        held_table=held.table,
        piece=piece,
        target=target_hosts[placed.host[pair]],
        target_box=placed.box[pair],
        own_box=np.where(is_own, origin // len(TIERS), -1),
        own_tier=np.where(is_own, origin % len(TIERS), -1),
        option=np.where(is_own, -1, origin - num_own),
        options=options,
        num_missing=int(is_missing.sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Holders:
    """Which host has which cell, `[n]` each, sorted by `key` = host × `total` + cell, each once.

    `total` is the number of all cells.
    """

    total: int

    key: Column
    host: Column
    cell: Column
    box: Column
    tier: Column

    @classmethod
    def of(cls, held: HeldBoxes, num_cells: Sequence[int]) -> _Holders:
        total = math.prod(num_cells)
        row, cell = _spread(held.box, held.table, num_cells)
        key = held.host[row] * total + cell
        order = np.lexsort((held.box[row], held.tier[row], key))
        first = order[np.concatenate(([True], key[order][1:] != key[order][:-1]))] if len(order) else order
        row, cell = row[first], cell[first]
        return cls(
            total=total,
            key=key[first],
            host=held.host[row],
            cell=cell,
            box=held.box[row],
            tier=held.tier[row],
        )

    def find(self, host: Column, cell: Column) -> Column:
        """Return the place of each cell of a host, -1 where it is not."""
        key = host * self.total + cell
        if not len(self.key):
            return np.full(len(key), -1, np.int64)
        place = np.minimum(np.searchsorted(self.key, key), len(self.key) - 1)
        return np.where(self.key[place] == key, place, -1)

    def senders(self) -> _Holders:
        """Return those to ask over the network, by cell then host: memory, persistent where there is none."""
        in_memory = self.tier < PERSISTENT
        rows = np.flatnonzero(in_memory | ~np.isin(self.cell, self.cell[in_memory]))
        rows = rows[np.argsort(self.cell[rows], kind="stable")]
        return _Holders(
            total=self.total,
            key=self.key[rows],
            host=self.host[rows],
            cell=self.cell[rows],
            box=self.box[rows],
            tier=self.tier[rows],
        )


def _spread(box: Column, table: BoxTable, num_cells: Sequence[int]) -> tuple[Column, Column]:
    """Return (row, cell) for every cell of the box of every row; `box` has the box of each, `[n]`."""
    of_box, cells = cells_of(table, num_cells)
    counts = np.bincount(of_box, minlength=len(table.low))
    begins = np.cumsum(counts) - counts
    return np.repeat(np.arange(len(box)), counts[box]), cells[spread(begins[box], counts[box])]


def _options(
    target: Column, cell: Column, senders: _Holders, slice_of: Column, prefers_own_slice: bool
) -> tuple[Column, Runs, NDArray[np.bool_]]:
    """Return each wanted cell's option, the options, and which cells nobody has, `[n]` each."""
    sender_slice = slice_of[senders.host]
    near = np.full(len(target), -1, np.int64)  # the slice whose senders alone count
    if prefers_own_slice:
        held_near = sender_slice * senders.total + senders.cell
        is_near = np.isin(slice_of[target] * senders.total + cell, held_near)
        near[is_near] = slice_of[target[is_near]]
    num_places = int(slice_of.max(initial=0)) + 2
    wanted, which = np.unique(cell * num_places + near + 1, return_inverse=True)
    cells, near = wanted // num_places, wanted % num_places - 1
    begins = np.asarray(np.searchsorted(senders.cell, cells, side="left"))
    lengths = np.searchsorted(senders.cell, cells, side="right") - begins
    rows = spread(begins, lengths)
    only = np.repeat(near, lengths)
    kept = (only < 0) | (sender_slice[rows] == only)
    lengths = np.bincount(np.repeat(np.arange(len(wanted)), lengths)[kept], minlength=len(wanted))
    rows = rows[kept]
    columns = np.stack((senders.host[rows], senders.box[rows], senders.tier[rows]), axis=1)
    options, number = Runs.of(lengths, columns).distinct()
    option = number[which]
    return option, options, options.lengths[option] == 0


def held_boxes(parts: Sequence[HeldBoxes], rank: int) -> HeldBoxes:
    """Return several holdings as one, with one table."""
    offsets = np.cumsum([0, *(len(part.table.low) for part in parts)])
    none, no_box = np.zeros(0, np.int64), np.zeros((0, rank), np.int64)
    return HeldBoxes(
        table=BoxTable(
            low=np.concatenate([no_box, *(part.table.low for part in parts)]),
            high=np.concatenate([no_box, *(part.table.high for part in parts)]),
        ),
        host=np.concatenate([none, *(part.host for part in parts)]),
        box=np.concatenate([none, *(part.box + int(offsets[at]) for at, part in enumerate(parts))]),
        tier=np.concatenate([none, *(part.tier for part in parts)]),
    )
