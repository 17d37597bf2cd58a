"""Which slice sits at which logical index: `seats[i]` is that at index i; one without a seat is a spare.

A slice (its agent, its memory, its name in the history) keeps its number for life. Ranks go by seats, so that
a spare that takes the seat of a lost slice makes the world the same as before: the same program, the same
rows, the same order of every sum. The lost slice, when it is back, is the new spare. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from reshard.ids import HostId
from reshard.layout import Layout

Seats = tuple[int, ...]


def filled(seats: Seats, able: Collection[int]) -> Seats:
    """The seats after those that are `able` and have none took those of slices that are not, lowest first."""
    spares = [index for index in sorted(able) if index not in seats]
    taken = []
    for index in seats:
        taken.append(spares.pop(0) if index not in able and spares else index)
    return tuple(taken)


def seated(seats: Seats, able: Collection[int]) -> tuple[int, ...]:
    """Those able to be in a world, in the order of their seats, after spares took the seats of others."""
    return tuple(index for index in filled(seats, able) if index in able)


def logical(seats: Seats, slices: Sequence[int]) -> tuple[int, ...]:
    """The logical indexes of these slices, all of which have a seat."""
    return tuple(seats.index(index) for index in slices)


def tell_changes(before: Seats, after: Seats) -> str:
    """Who took whose seat, as a sentence without its end; "" when nobody did."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    return "; ".join(f"slice {new}, a spare, takes the place of slice {old}" for old, new in pairs)


def in_order(layout: Layout, hosts: Sequence[HostId]) -> Layout:
    """A layout that was made for `hosts` in the order of their numbers, for them in the order given."""
    names = dict(zip(sorted(hosts), hosts, strict=True))
    if all(old == new for old, new in names.items()):
        return layout
    mesh = layout.mesh
    return replace(layout, mesh=replace(mesh, hosts=tuple(names[host] for host in mesh.hosts)))
