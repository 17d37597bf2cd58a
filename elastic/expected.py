"""The layout that a script is expected to ask for on the slices at hand, so that its boxes are there in time.

What it asked for in a world (or rehearsal) of so many slices is what it will ask for again. For another
number the rule of `World.sharding` is taken: the axis that spans slices takes another size, and a dim that
does not divide is replicated over it. A script that does otherwise says so, and gets another try
(`moves_restore.lay_out_anew`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from elastic.seats import in_order
from reshard.boxes import Box, uncovered
from reshard.candidates import Kind
from reshard.choice import LayoutChoice, choose_layout
from reshard.holdings import Shard
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.stock import Stock

FOLLOWED: frozenset[Kind] = frozenset({"shrink", "replicate"})
"""What a script follows that gets its shardings from `World.sharding`."""
WITH_IDLE: frozenset[Kind] = FOLLOWED | frozenset({"fewer-slices"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The layout expected on `slices`, which are fewer than there are where no layout takes all of them.

    `why` tells where a dim is not partitioned as it would be on more slices, and which slices are idle; ""
    elsewhere.
    """

    slices: tuple[int, ...]
    layout: Layout
    why: str = ""

    def in_order(self, hosts: tuple[HostId, ...]) -> Expected:
        """The same with slices in the order of `hosts`, in which slices may sit at others' places."""
        used = tuple(host for host in hosts if host.slice_index in self.slices)
        slices = tuple(dict.fromkeys(host.slice_index for host in used))
        return replace(self, slices=slices, layout=in_order(self.layout, used))


def expect_layout(
    snapshot: Layout,
    hosts: tuple[HostId, ...],
    devices_per_host: int,
    *,
    told: Mapping[int, Layout],
    held: Stock,
) -> Expected:
    """The layout expected for a state that is `held`, in a snapshot laid out as `snapshot`, on these hosts.

    `told` are the layouts that the script has asked for, by number of slices; those of other arrays than the
    snapshot's do not count. Raises UsageError when there is none.
    """
    told = {number: layout for number, layout in told.items() if _arrays(layout) == _arrays(snapshot)}
    widest = max([snapshot, *told.values()], key=lambda layout: layout.mesh.num_slices)
    ruled = _follow(widest, hosts, devices_per_host, held)
    slices = tuple(sorted({host.slice_index for host in hosts}))
    if len(slices) in told:
        layout = told[len(slices)].resized(hosts, devices_per_host)
        return Expected(slices=slices, layout=layout, why=_describe(layout, widest, ruled))
    layout, chosen = ruled.require(), ruled.candidates[0]
    if chosen.idle and len(chosen.slices) in told:
        used = tuple(host for host in hosts if host.slice_index in chosen.slices)
        layout = told[len(chosen.slices)].resized(used, devices_per_host)
    why = ruled.sentence() if chosen.idle else _describe(layout, widest, ruled)
    return Expected(slices=chosen.slices, layout=layout, why=why)


def expect_fresh(
    hosts: tuple[HostId, ...], devices_per_host: int, told: Mapping[int, Layout]
) -> Expected | None:
    """The layout expected for a fresh state, None while the script has not told any.

    Raises UsageError when there is none for these hosts.
    """
    if not told:
        return None
    nothing = Stock(hosts=(), groups=())
    return expect_layout(told[max(told)], hosts, devices_per_host, told=told, held=nothing)


class Stored(Protocol):
    """What is here of a state; `snapshot.source.ShardSource` is one."""

    def boxes(self, path: str) -> tuple[Box, ...]:
        """Return the boxes of `path` that are stored."""
        ...


def first_lacking(layout: Layout, hosts: Iterable[HostId], stored: Stored) -> Shard | None:
    """The path and box of the first elements that `hosts` need for `layout` and are not stored, if any."""
    here = tuple(hosts)
    for array in layout.arrays:
        held, boxes = stored.boxes(array.path), layout.boxes_by_host(array)
        needed = {box for host in here for box in boxes.get(host, ())}
        for box in sorted(needed.difference(held)):
            if gaps := uncovered(box, held):
                return array.path, gaps[0]
    return None


def _follow(layout: Layout, hosts: tuple[HostId, ...], devices_per_host: int, held: Stock) -> LayoutChoice:
    """The layout by the rule on all slices, where there is one; on fewer elsewhere."""
    axes = None if layout.elastic_axis is None else (layout.elastic_axis,)
    choice = choose_layout(layout, hosts, devices_per_host, holdings=held, axes=axes, allow=FOLLOWED)
    if choice.layout is None:
        choice = choose_layout(layout, hosts, devices_per_host, holdings=held, axes=axes, allow=WITH_IDLE)
    return choice


def _describe(layout: Layout, widest: Layout, ruled: LayoutChoice) -> str:
    """Why `layout` does not partition the arrays as `widest` does; "" when it does."""
    if _specs(layout) == _specs(widest):
        return ""
    if ruled.layout is not None and _specs(layout) == _specs(ruled.layout):
        return ruled.sentence()
    return f"the state is laid out as the script did it on {layout.mesh.num_slices} slices before"


def _arrays(layout: Layout) -> set[tuple[str, tuple[int, ...], str]]:
    return {(array.path, array.shape, array.dtype) for array in layout.arrays}


def _specs(layout: Layout) -> dict[str, object]:
    return {array.path: array.spec for array in layout.arrays}
