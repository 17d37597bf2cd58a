"""How many bytes the hosts of a mesh lack of arrays in some layout: the lower bound of what a plan moves.

Works on columns and for whole groups of arrays, so that several layouts can be compared without a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from reshard.boxes import Box, uncovered
from reshard.grid import Column, as_boxes, element_boxes, layout_edges, placement
from reshard.layout import ArrayLayout, MeshLayout
from reshard.stock import HeldGroup, Stock

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Boxes that hosts hold of a group of arrays: `host` and `num_arrays` `[n]`, `boxes` `[n, rank, 2]`.

    The boxes that a host holds of one array do not overlap.
    """

    host: Column
    boxes: Column
    num_arrays: Column


class Needs(Generic[K]):
    """What is held of groups of arrays; the arrays of a group have one shape, `paths_by_group` names them."""

    def __init__(self, stock: Stock, paths_by_group: Mapping[K, Iterable[str]]) -> None:
        self._hosts = stock.hosts
        group_of = {path: group for group, paths in paths_by_group.items() for path in paths}
        held_as: defaultdict[str, list[int]] = defaultdict(list)
        for index, held in enumerate(stock.groups):
            for path in held.paths:
                if path in group_of:
                    held_as[path].append(index)
        counts: defaultdict[tuple[K, tuple[int, ...]], int] = defaultdict(int)
        for path, indices in held_as.items():
            counts[group_of[path], tuple(indices)] += 1
        parts: defaultdict[K, list[_Rows]] = defaultdict(list)
        for (group, alike), num_arrays in counts.items():
            parts[group].append(_rows([stock.groups[index] for index in alike], num_arrays))
        self._rows = {group: _together(rows) for group, rows in parts.items()}

    def elements_by_slice(self, group: K) -> dict[int, int]:
        """Return how many elements of the group's arrays each slice holds, copies counted each."""
        if group not in self._rows:
            return {}
        rows = self._rows[group]
        slices, number = np.unique([host.slice_index for host in self._hosts], return_inverse=True)
        held = np.zeros(len(slices), np.int64)
        np.add.at(held, number[rows.host], rows.num_arrays * _volumes(rows.boxes))
        return {index: count for index, count in zip(slices.tolist(), held.tolist(), strict=True) if count}

    def lacking(
        self, group: K, mesh: MeshLayout, array: ArrayLayout, num_arrays: int, target: Column
    ) -> Column:
        """Return the bytes that each of `mesh.distinct_hosts()` needs and does not hold: `[num_hosts]`.

        `array` is one of the group's `num_arrays`, in the layout wanted; `target` is `targets(mesh)`.
        """
        placed = placement(mesh, array.spec)
        wanted = element_boxes(layout_edges(mesh, array), placed.table)
        needed = np.zeros(len(mesh.distinct_hosts()), np.int64)
        np.add.at(needed, placed.host, num_arrays * _volumes(wanted)[placed.box])
        if group in self._rows:
            rows = self._rows[group]
            rows = replace(rows, host=target[rows.host])
            needed -= _held_of(placed.host, placed.box, wanted, rows, len(needed))
        return needed * array.itemsize

    def targets(self, mesh: MeshLayout) -> Column:
        """Return the number in the mesh of each host that holds something, -1 for those not in the mesh."""
        number = {host: index for index, host in enumerate(mesh.distinct_hosts())}
        return np.array([number.get(host, -1) for host in self._hosts], np.int64)


def _held_of(host: Column, box: Column, wanted: Column, rows: _Rows, num_hosts: int) -> Column:
    """Return the elements, by host, of the wanted boxes (`box[i]` on `host[i]`, sorted) that `rows` has."""
    begins = np.searchsorted(host, np.arange(num_hosts + 1))
    kept = rows.host >= 0
    on, held, weight = rows.host[kept], rows.boxes[kept], rows.num_arrays[kept]
    counts = begins[on + 1] - begins[on]
    row = np.repeat(np.arange(len(on)), counts)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + begins[on[row]]
    both = np.ones(len(row), np.int64)
    for dim in range(wanted.shape[1]):
        low = np.maximum(wanted[box[place], dim, 0], held[row, dim, 0])
        high = np.minimum(wanted[box[place], dim, 1], held[row, dim, 1])
        both *= np.maximum(high - low, 0)
    found = np.zeros(num_hosts, np.int64)
    np.add.at(found, on[row], both * weight[row])
    return found


def _volumes(boxes: Column) -> Column:
    volumes: Column = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1, dtype=np.int64)
    return volumes


def _rows(groups: Sequence[HeldGroup], num_arrays: int) -> _Rows:
    """Return what is held of arrays that are in these groups of a stock, boxes of one host made disjoint."""
    host = np.concatenate([group.host for group in groups])
    boxes = np.concatenate([group.boxes[group.box] for group in groups])
    is_grid = len(groups) == 1 and bool((groups[0].table.high - groups[0].table.low == 1).all())
    if not is_grid or len(np.unique(host * len(boxes) + groups[0].box)) < len(host):
        host, boxes = _disjoint(host, boxes)
    return _Rows(host=host, boxes=boxes, num_arrays=np.full(len(host), num_arrays, np.int64))


def _disjoint(host: Column, boxes: Column) -> tuple[Column, Column]:
    """Return the same elements of each host in boxes that do not overlap."""
    by_host: defaultdict[int, set[Box]] = defaultdict(set)
    for index, box in zip(host.tolist(), as_boxes(boxes), strict=True):
        by_host[index].add(box)
    hosts: list[int] = []
    pieces: list[Box] = []
    for index, held in sorted(by_host.items()):
        apart: list[Box] = []
        for box in sorted(held):
            apart += uncovered(box, apart)
        hosts += [index] * len(apart)
        pieces += apart
    return np.array(hosts, np.int64), np.array(pieces, np.int64).reshape(len(hosts), *boxes.shape[1:])


def _together(parts: Sequence[_Rows]) -> _Rows:
    return _Rows(
        host=np.concatenate([part.host for part in parts]),
        boxes=np.concatenate([part.boxes for part in parts]),
        num_arrays=np.concatenate([part.num_arrays for part in parts]),
    )
