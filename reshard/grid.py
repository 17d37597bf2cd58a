"""Boxes in the coordinates of cut edges, so that arrays of different shapes share their structure.

Along each dim of an array the *edges* are the places where any of its boxes begins or ends, in order. A box
is then a range of edge numbers in each dim, and the smallest boxes between neighbouring edges are the
*cells*. How boxes overlap depends on these numbers alone: layers that are partitioned alike are worked out
once, whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reshard.boxes import Box
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Spec, dim_edges
from reshard.mesh import MeshLayout

__all__ = [
    "BoxTable",
    "Column",
    "Edges",
    "Placement",
    "as_boxes",
    "cell_table",
    "cells_of",
    "element_boxes",
    "layout_edges",
    "merge_neighbours",
    "num_elements",
    "placement",
    "refine",
    "renumbered",
    "slice_column",
    "table_of_boxes",
]

Column = NDArray[np.int64]
Edges = tuple[Column, ...]
"""For each dim the places where boxes begin and end, ascending; equal ones bound empty boxes."""
_SCALAR: Column = np.zeros((1, 0), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxTable:
    """Boxes as ranges of edge numbers: `low` and `high` have shape `[num_boxes, rank]`."""

    low: Column
    high: Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Which host has which of the boxes a spec makes, `[n]` each: (host, box) pairs, each once, sorted.

    `host` is an index into the mesh's `distinct_hosts()`, `box` one into `table`.
    """

    table: BoxTable
    host: Column
    box: Column


@lru_cache(maxsize=256)
def placement(mesh: MeshLayout, spec: Spec) -> Placement:
    """Return the placement of any array with this spec on the mesh; the same object for the same arguments.

    Boxes are numbered in C order of the parts of the dims.
    """
    num_parts = [mesh.num_parts(axes) for axes in spec]
    num_boxes = int(np.prod(num_parts, dtype=np.int64))
    box = np.zeros(mesh.num_devices, np.int64)
    for count, axes in zip(num_parts, spec, strict=True):
        box = box * count + mesh.part_index(axes)
    pairs = np.unique(mesh.host_index() * num_boxes + box)
    host, box = np.divmod(pairs, num_boxes)
    low = np.stack(np.unravel_index(np.arange(num_boxes), num_parts), axis=1) if num_parts else _SCALAR
    return Placement(table=BoxTable(low=low, high=low + 1), host=host, box=box)


def layout_edges(mesh: MeshLayout, array: ArrayLayout) -> Edges:
    """Return the edges of the boxes of `array` on the mesh, one more than there are parts in each dim."""
    return tuple(
        dim_edges(size, mesh.num_parts(axes)) for size, axes in zip(array.shape, array.spec, strict=True)
    )


def table_of_boxes(boxes: Column) -> tuple[Edges, BoxTable]:
    """Return boxes given as `[num_boxes, rank, 2]` element ranges as edges and ranges of edge numbers."""
    edges = tuple(np.unique(boxes[:, dim]) for dim in range(boxes.shape[1]))
    numbers = [np.searchsorted(edges[dim], boxes[:, dim]) for dim in range(boxes.shape[1])]
    table = np.stack(numbers, axis=1) if numbers else np.zeros((len(boxes), 0, 2), np.int64)
    return edges, BoxTable(low=table[:, :, 0], high=table[:, :, 1])


def element_boxes(edges: Edges, table: BoxTable) -> Column:
    """Return the boxes as element ranges, shape `[num_boxes, rank, 2]`."""
    boxes = np.empty((*table.low.shape, 2), np.int64)
    for dim, along in enumerate(edges):
        boxes[:, dim, 0] = along[table.low[:, dim]]
        boxes[:, dim, 1] = along[table.high[:, dim]]
    return boxes


def as_boxes(ranges: Column) -> list[Box]:
    """Return element ranges, `[n, rank, 2]`, as boxes."""
    return [tuple((start, stop) for start, stop in box) for box in ranges.tolist()]


def slice_column(hosts: Sequence[HostId]) -> Column:
    """Return the slice of each host, `[n]`."""
    return np.array([host.slice_index for host in hosts], np.int64)


def num_elements(edges: Edges, low: Column, high: Column) -> Column:
    """Return the number of elements of each box `[low, high)`, given as `[n, rank]` edge numbers."""
    product = np.ones(len(low), np.int64)
    for dim, along in enumerate(edges):
        product *= along[high[:, dim]] - along[low[:, dim]]
    return product


def refine(parts: Sequence[Edges]) -> tuple[Edges, list[tuple[Column, ...]]]:
    """Return the common edges of several, each once, and for each of them, by dim, its edges' new numbers."""
    common = tuple(np.unique(np.concatenate(along)) for along in zip(*parts, strict=True))
    numbers = [
        tuple(np.searchsorted(all_, own) for all_, own in zip(common, edges, strict=True)) for edges in parts
    ]
    return common, numbers


def renumbered(table: BoxTable, numbers: tuple[Column, ...]) -> BoxTable:
    """Return the boxes in the numbers of finer edges."""
    low, high = np.empty_like(table.low), np.empty_like(table.high)
    for dim, along in enumerate(numbers):
        low[:, dim] = along[table.low[:, dim]]
        high[:, dim] = along[table.high[:, dim]]
    return BoxTable(low=low, high=high)


def cells_of(table: BoxTable, num_cells: Sequence[int]) -> tuple[Column, Column]:
    """Return (box, cell) for every cell of every box, boxes in order; cells are numbered in C order."""
    lengths = table.high - table.low
    counts = lengths.prod(axis=1) if lengths.shape[1] else np.ones(len(lengths), np.int64)
    box = np.repeat(np.arange(len(counts)), counts)
    rest = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    cell = np.zeros(len(box), np.int64)
    stride = 1
    for dim in reversed(range(lengths.shape[1])):
        rest, offset = np.divmod(rest, lengths[box, dim])
        cell += (table.low[box, dim] + offset) * stride
        stride *= num_cells[dim]
    return box, cell


def cell_table(cell: Column, num_cells: Sequence[int]) -> BoxTable:
    """Return the cells with these numbers as boxes."""
    low = np.stack(np.unravel_index(cell, num_cells), axis=1) if num_cells else np.zeros((len(cell), 0), int)
    return BoxTable(low=low, high=low + 1)


def merge_neighbours(key: Column, table: BoxTable) -> tuple[Column, BoxTable]:
    """Return (key, boxes) in which boxes of one key that lie side by side are put together.

    `key` has shape `[n]`. Boxes of one key must not overlap. Along each dim in turn, the last first,
    neighbours that agree in all other dims become one.
    """
    low, high = table.low, table.high
    for dim in reversed(range(low.shape[1])):
        others = [column[:, d] for d in range(low.shape[1]) if d != dim for column in (low, high)]
        order = np.lexsort((low[:, dim], *others, key))
        key, low, high = key[order], low[order], high[order]
        joins = (key[1:] == key[:-1]) & (low[1:, dim] == high[:-1, dim])
        for other in range(low.shape[1]):
            if other != dim:
                joins &= (low[1:, other] == low[:-1, other]) & (high[1:, other] == high[:-1, other])
        if not joins.any():
            continue
        first = np.flatnonzero(np.concatenate(([True], ~joins)))
        last = np.concatenate((first[1:], [len(key)])) - 1
        ends = high[last, dim]
        key, low, high = key[first], low[first], high[first]
        high[:, dim] = ends
    return key, BoxTable(low=low, high=high)
