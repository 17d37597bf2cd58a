"""The smallest set of transfers that turns what survived into a target layout.

Every host takes first what it holds itself, then, for the elements it lacks, exactly one other source each.
So network bytes equal the lower bound, whatever the choice of sources; the choice prefers near ones and evens
out what they send. The work grows with hosts × different partitionings, not with the number of arrays:
arrays that are partitioned and held alike are one `Pattern`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from reshard.assignment import assign
from reshard.boxes import Box, full_box, uncovered
from reshard.errors import MissingShardError, UsageError
from reshard.grid import (
    BoxTable,
    Column,
    Edges,
    layout_edges,
    placement,
    refine,
    renumbered,
    slice_column,
)
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from reshard.links import Links
from reshard.matching import MAX_CELLS, HeldBoxes, held_boxes, match, num_cells_of
from reshard.pattern import Pattern
from reshard.plan import Plan
from reshard.plan_rows import ArrayClass, PlanGroup, Rows
from reshard.stock import HeldGroup, Stock, check_inside, held_boxes_of

MIN_CUT_BYTES = 256 << 10
"""A smaller part of an array costs more as a request of its own than it evens out."""


def make_plan(
    layout: Layout,
    holdings: Iterable[Holding] | Stock,
    *,
    step: int,
    lost: Iterable[HostId] = (),
    links: Links | None = None,
    min_cut_bytes: int = MIN_CUT_BYTES,
) -> Plan:
    """Return the plan that gives every host of `layout` its boxes of the state at `step`.

    `holdings` of other steps and of arrays the layout lacks are ignored; a `Stock` is of that step. A nearer
    tier is preferred: first on the target host itself, then memory before the persistent tier among remote
    hosts, and among these the nearer by `links`. To even out the sources an array is cut, but into no part
    below `min_cut_bytes`. Equal inputs in any order give an equal plan.

    Raises `MissingShardError`, naming the first array and its first missing box, when an element is nowhere:
    the plan is whole or there is none. `lost` only serves that message. Raises `UsageError` for a holding
    outside its array, and for boxes so different that they cut it into too many pieces.
    """
    stock = holdings if isinstance(holdings, Stock) else Stock.of_holdings(holdings, step)
    patterns = _Patterns(layout, stock, links or Links())
    for arrays, held in _alike(layout, stock):
        patterns.add(arrays, held)
    patterns.check_complete(step, lost)
    found = [pattern for pattern in patterns.found if len(pattern.match.target)]
    assigned = assign(found, len(patterns.hosts), min_cut_bytes=min_cut_bytes)
    return Plan(
        step=step,
        hosts=patterns.hosts,
        groups=tuple(_group(pattern, rows) for pattern, rows in zip(found, assigned, strict=True)),
        bytes_lower_bound=sum(int(p.nbytes[p.match.option >= 0].sum()) for p in found),
    )


def _alike(layout: Layout, stock: Stock) -> list[tuple[list[ArrayLayout], tuple[HeldGroup, ...]]]:
    """Return the arrays of one shape, itemsize and spec that are held alike, with what holds them."""
    held_in: defaultdict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(stock.groups):
        for path in group.paths:
            held_in[path].append(number)
    alike: defaultdict[object, list[ArrayLayout]] = defaultdict(list)
    for array in sorted(layout.arrays, key=lambda array: array.path):
        held = tuple(held_in.get(array.path, ()))
        alike[array.shape, array.itemsize, array.spec, held].append(array)
    return [
        (arrays, tuple(stock.groups[number] for number in held_in.get(arrays[0].path, ())))
        for arrays in alike.values()
    ]


class _Patterns:
    """The patterns of a plan, found one after the other."""

    def __init__(self, layout: Layout, stock: Stock, links: Links) -> None:
        own_hosts = layout.mesh.distinct_hosts()
        self.hosts = tuple(sorted({*own_hosts, *stock.hosts}))
        index = {host: number for number, host in enumerate(self.hosts)}
        self._target_hosts = np.array([index[host] for host in own_hosts], np.int64)
        self._stock_hosts = np.array([index[host] for host in stock.hosts], np.int64)
        self._slice_of = slice_column(self.hosts)
        self._layout = layout
        self._prefers_own_slice = links.prefers_own_slice
        self._known: dict[object, Pattern] = {}
        self._incomplete: list[tuple[ArrayLayout, tuple[HeldGroup, ...]]] = []
        self.found: list[Pattern] = []

    def add(self, arrays: Sequence[ArrayLayout], held: tuple[HeldGroup, ...]) -> None:
        """Take in arrays of one shape, itemsize and spec that are held in the same groups."""
        array = arrays[0]
        for group in held:
            check_inside(group, array)
        own = layout_edges(self._layout.mesh, array)
        edges, numbers = refine([own, *(group.edges for group in held)])
        key = (array.spec, *map(_identity, held), *(along.tobytes() for n in numbers for along in n))
        pattern = self._known.get(key)
        if pattern is None:
            pattern = self._known[key] = self._match(array, edges, held, numbers)
            self.found.append(pattern)
        pattern.add(ArrayClass(paths=tuple(a.path for a in arrays), itemsize=array.itemsize, edges=edges))
        if pattern.match.num_missing:
            self._incomplete += [(missing, held) for missing in arrays]

    def check_complete(self, step: int, lost: Iterable[HostId]) -> None:
        """Raise `MissingShardError` when a needed element is nowhere."""
        if self._incomplete:
            order = {array.path: number for number, array in enumerate(self._layout.arrays)}
            array, held = min(self._incomplete, key=lambda missing: order[missing[0].path])
            raise MissingShardError(array.path, _first_gap(array, held), step, lost=lost)

    def _match(
        self,
        array: ArrayLayout,
        edges: Edges,
        held: tuple[HeldGroup, ...],
        numbers: list[tuple[Column, ...]],
    ) -> Pattern:
        placed = placement(self._layout.mesh, array.spec)
        parts = [
            HeldBoxes(
                table=renumbered(group.table, of_group),
                host=self._stock_hosts[group.host],
                box=group.box,
                tier=group.tier,
            )
            for group, of_group in zip(held, numbers[1:], strict=True)
        ]
        target_table, in_all = renumbered(placed.table, numbers[0]), held_boxes(parts, len(array.shape))
        _check_cells(array, num_cells_of(placed.box, target_table) + num_cells_of(in_all.box, in_all.table))
        return Pattern(
            match(
                placed,
                target_table,
                self._target_hosts,
                in_all,
                [len(along) - 1 for along in edges],
                self._slice_of,
                prefers_own_slice=self._prefers_own_slice,
            )
        )


def _identity(group: HeldGroup) -> tuple[int, ...]:
    return id(group.table), id(group.host), id(group.box), id(group.tier)


def _check_cells(array: ArrayLayout, num_cells: float) -> None:
    """Raise `UsageError` when boxes that all begin and end elsewhere make too many pieces."""
    if num_cells > MAX_CELLS:
        raise UsageError(
            f"what hosts hold and need of {array.path!r} falls into {num_cells:,.0f} pieces: its boxes "
            f"are not those of a few layouts",
            remedy="Leave out holdings whose boxes are those of no layout, or that other ones cover.",
            path=array.path,
        )


def _first_gap(array: ArrayLayout, held: Iterable[HeldGroup]) -> Box:
    return uncovered(full_box(array.shape), [box for group in held for box in held_boxes_of(group)])[0]


def _group(pattern: Pattern, rows: Rows) -> PlanGroup:
    """Return a pattern's part of the plan: pieces, target boxes and source boxes in one table."""
    tables = (pattern.match.piece, pattern.match.target_table, pattern.match.held_table)
    num_pieces, num_targets = len(tables[0].low), len(tables[1].low)
    boxes = BoxTable(
        low=np.concatenate([table.low for table in tables]),
        high=np.concatenate([table.high for table in tables]),
    )
    columns = rows.columns()
    columns["target_box"] = columns["target_box"] + num_pieces
    columns["source_box"] = columns["source_box"] + num_pieces + num_targets
    return PlanGroup(classes=tuple(pattern.classes), boxes=boxes, rows=Rows(**columns))
