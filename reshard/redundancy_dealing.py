"""Which pattern each array of a layout takes, so that all hosts have the same bytes.

The largest boxes come first, and each array takes the pattern whose hosts have the fewest bytes so far: list
scheduling, with patterns in place of machines (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
Hosts that hold the same boxes end within one box of each other where patterns share no host. Where they do,
that is not proved; no more than two of the largest were ever seen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.boxes import Box
from reshard.errors import UsageError
from reshard.grid import BoxTable, Column, Edges, as_boxes, element_boxes, layout_edges, num_elements
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from reshard.redundancy_patterns import Patterns, patterns

SMALL = 0.01
"""By so much of the mean share a host's may grow for arrays alike that take few patterns."""
FEW_PATTERNS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DealtGroup:
    """Arrays of one shape, spec and itemsize that take the same pattern.

    `ranks` are their places in the order in which all arrays were dealt; `nbytes` has the bytes of each box.
    """

    paths: tuple[str, ...]
    ranks: tuple[int, ...]
    patterns: Patterns
    pattern: int
    edges: Edges
    nbytes: Column

    @property
    def host(self) -> Column:
        """The host of each row of `patterns.box`."""
        host: Column = self.patterns.host[self.pattern]
        return host

    def boxes(self, numbers: Column) -> list[Box]:
        """Return the boxes with these numbers, as the layout has them."""
        table = self.patterns.table
        some = BoxTable(low=table.low[numbers], high=table.high[numbers])
        return as_boxes(element_boxes(self.edges, some))

    def is_distinct(self, numbers: Column) -> NDArray[np.bool_]:
        """Tell which of these boxes do not repeat an earlier one, as the empty parts of a padded dim do."""
        distinct = np.ones(len(numbers), bool)
        for low, edges in zip(self.patterns.table.low[numbers].T, self.edges, strict=True):
            distinct &= low <= last_part(edges)
        return distinct


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dealing:
    """All arrays of a layout, the largest boxes first; hosts are numbered as in `hosts`, which are sorted."""

    hosts: tuple[HostId, ...]
    groups: tuple[DealtGroup, ...]

    def index_of(self, host: HostId) -> int:
        """Return the number of a host; raises `UsageError` for one that is not in the mesh."""
        if host not in self.hosts:
            raise UsageError(f"{host} is not a host of the mesh", host=str(host))
        return self.hosts.index(host)


def as_cut(array: ArrayLayout) -> ArrayLayout:
    """Return the array with a spec that cuts no dim without elements: all parts of that are one."""
    if all(array.shape):
        return array
    spec = tuple(axes if size else () for size, axes in zip(array.shape, array.spec, strict=True))
    return replace(array, spec=spec)


def last_part(edges: Column) -> int:
    """Return the number of the last part of a dim that is not a repeated empty one."""
    return min(int(np.searchsorted(edges, edges[-1])), len(edges) - 2)


@lru_cache(maxsize=4)
def deal(layout: Layout, replicas: int) -> Dealing:
    """Return which pattern each array takes. Raises `UsageError` when `replicas` is below 1."""
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1, got {replicas}", replicas=replicas)
    hosts = layout.mesh.distinct_hosts()
    scale = Scale(len(hosts))
    num_dealt = 0
    groups: list[DealtGroup] = []
    all_alike = _alike(layout, replicas)
    small_nbytes = SMALL * sum(alike.dealt_nbytes for alike in all_alike) / len(hosts)
    for alike in all_alike:
        made, nbytes = alike.patterns, alike.nbytes
        taken = _taken(scale, alike, small_nbytes)
        for pattern in sorted(set(taken)):
            places = [place for place, other in enumerate(taken) if other == pattern]
            groups.append(
                DealtGroup(
                    paths=tuple(alike.paths[place] for place in places),
                    ranks=tuple(num_dealt + place for place in places),
                    patterns=made,
                    pattern=pattern,
                    edges=alike.edges,
                    nbytes=nbytes,
                )
            )
        num_dealt += len(taken)
    return Dealing(hosts=hosts, groups=tuple(groups))


class Scale:
    """The bytes given to each host so far; options are `[num_options, n]`: hosts of as many boxes each."""

    __slots__ = ("_load", "_used")

    def __init__(self, num_hosts: int) -> None:
        self._load = np.zeros(num_hosts, np.int64)
        self._used: dict[object, Column] = {}

    def take_lightest(self, key: object, options: Column, nbytes: Column) -> int:
        """Give boxes of `nbytes`, `[n]`, to the hosts with the fewest bytes together; return which option.

        Of equals it is the one used least. What is counted of that is told apart by `key`.
        """
        used = self._used.setdefault(key, np.zeros(len(options), np.int64))
        loads = self._load[options].sum(axis=1)
        lightest = np.flatnonzero(loads == loads.min())
        option = int(lightest[used[lightest].argmin()])
        used[option] += nbytes.sum()
        self.add(options[option], nbytes)
        return option

    def add(self, hosts: Column, nbytes: Column) -> None:
        """Give hosts, `[n]`, boxes of `nbytes`, `[n]`."""
        np.add.at(self._load, hosts, nbytes)


class _Alike(NamedTuple):
    """Arrays of one shape, spec and itemsize."""

    paths: tuple[str, ...]
    patterns: Patterns
    edges: Edges
    nbytes: Column

    @property
    def row_nbytes(self) -> Column:
        """The bytes of each row of `patterns.box`; empty boxes are dealt evenly too, so they count as one."""
        return np.maximum(self.nbytes, 1)[self.patterns.box]

    @property
    def dealt_nbytes(self) -> int:
        """The bytes of all copies of all the arrays."""
        return int(self.row_nbytes.sum()) * len(self.paths)


def _taken(scale: Scale, alike: _Alike, small_nbytes: float) -> list[int]:
    """Return the patterns that arrays alike take.

    Arrays that make at most `small_nbytes` on any host when they take a few patterns do so: spread over all,
    each could be held by hosts of its own, and would be planned by itself.
    """
    made, row_nbytes, num_arrays = alike.patterns, alike.row_nbytes, len(alike.paths)
    if made.num_patterns == 1:
        scale.add(made.host[0], row_nbytes * num_arrays)
        return [0] * num_arrays
    options = made.host
    if np.bincount(made.host[0], weights=row_nbytes).max() * num_arrays <= FEW_PATTERNS * small_nbytes:
        options = made.host[:FEW_PATTERNS]
    key = id(made), len(options)
    return [scale.take_lightest(key, options, row_nbytes) for _ in range(num_arrays)]


def _alike(layout: Layout, replicas: int) -> list[_Alike]:
    """Return the arrays, those alike together: first what has no choice, then by the size of the boxes."""
    by_shape: defaultdict[object, list[ArrayLayout]] = defaultdict(list)
    for array in map(as_cut, layout.arrays):
        by_shape[array.spec, array.shape, array.itemsize].append(array)
    num_arrays = Counter(array.spec for arrays in by_shape.values() for array in arrays)
    by_spec = {spec: patterns(layout.mesh, spec, replicas, num) for spec, num in num_arrays.items()}
    found: list[_Alike] = []
    for arrays in by_shape.values():
        made = by_spec[arrays[0].spec]
        edges = layout_edges(layout.mesh, arrays[0])
        nbytes = num_elements(edges, made.table.low, made.table.high) * arrays[0].itemsize
        found.append(_Alike(tuple(sorted(array.path for array in arrays)), made, edges, nbytes))
    return sorted(
        found, key=lambda alike: (alike.patterns.num_patterns > 1, -alike.nbytes.max(), alike.paths)
    )
