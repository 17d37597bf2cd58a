"""The layout to go on with when the number of slices changes: candidates, what each takes, and the choice.

A candidate must fit the memory of devices and hosts. Of those that do, the one that costs least time is
chosen: moving the state there, and then the steps until the number of slices changes again. Pure: the same
arguments give the same choice everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from reshard.candidates import Change, Kind, group_arrays
from reshard.choice_figures import Candidate, Costs, Limits, SimpleCosts, held_slices_first
from reshard.choice_measure import Question, measured_candidates
from reshard.choice_text import describe, summarise
from reshard.errors import UsageError
from reshard.fits import broken_slices, hosts_of_slices, spanning_axes
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.needs import Needs
from reshard.stock import Stock, check_stock

ALLOWED: frozenset[Kind] = frozenset({"shrink", "replicate", "fewer-slices"})
"""What a program can follow without storing its arrays in another shape."""
HORIZON_STEPS = 1000
"""Steps until the number of slices changes again: some minutes to an hour, as a slice takes to come back."""
SAME_COST = 0.02
"""Costs that differ by less are the same: predictions are not better than that."""
EASIEST: tuple[Kind, ...] = ("shrink", "replicate", "replicate-and-pad", "fewer-slices", "pad")
"""What asks least of the program first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """All candidates, the best first and those refused last, and the layout of the best (None: all refused).

    `horizon_steps` are the steps that `cost_s` of a candidate counts.
    """

    num_slices_before: int
    horizon_steps: int
    candidates: tuple[Candidate, ...]
    layout: Layout | None

    def __post_init__(self) -> None:
        if not self.candidates:
            raise UsageError("a layout choice needs a candidate")

    @property
    def chosen(self) -> Candidate | None:
        """The candidate whose layout was chosen, None when all were refused."""
        return None if self.layout is None else self.candidates[0]

    def require(self) -> Layout:
        """Return the layout. Raises `UsageError`, with the reasons, when all candidates were refused."""
        if self.layout is None:
            raise UsageError(
                summarise(self),
                remedy="Use another number of slices or other axis sizes, allow more kinds, or more memory.",
            )
        return self.layout

    def sentence(self) -> str:
        """Return the choice in one line."""
        return summarise(self)

    def explain(self) -> str:
        """Return the choice, what else was possible, and what was refused and why, as lines of text."""
        return describe(self)

    def to_json(self) -> bytes:
        """Return the choice as one JSON object that `from_json` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> LayoutChoice:
        """Read what `to_json` wrote; raises `UsageError` naming the first field that does not fit."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise UsageError(f"this is not a layout choice: {error}") from error


def choose_layout(
    layout: Layout,
    hosts: Iterable[HostId],
    devices_per_host: int,
    *,
    holdings: Stock | Iterable[Holding] | None = None,
    axes: tuple[str, ...] | None = None,
    limits: Limits | None = None,
    allow: frozenset[Kind] = ALLOWED,
    costs: Costs | None = None,
    horizon_steps: int = HORIZON_STEPS,
) -> LayoutChoice:
    """Return the best layout of the arrays of `layout` for `hosts`, and what else there was.

    `layout` is how the state is to be partitioned where that is possible. `holdings`, all of one step, are
    what the hosts have of it; None stands for what `layout` puts on those of its hosts that are left. One of
    `axes` takes another size (default: the elastic axis, and all that span slices). `allow` names the kinds
    of candidates that may be chosen; the others are only shown. Where slices must be idle, those that hold
    least of the state are, then those of the highest index. Raises `UsageError` when no axis spans slices,
    for one of `axes` that the mesh does not have, and for a holding outside its array.
    """
    present = hosts_of_slices(hosts)
    if not present or devices_per_host < 1:
        raise UsageError(f"cannot lay out on {len(present)} slices of {devices_per_host} devices a host")
    names = _axes_to_change(layout, axes)
    groups = group_arrays(layout.arrays)
    stock = _stock(layout, holdings)
    if holdings is not None:
        check_stock(stock, layout.arrays)
    question = Question(
        layout=layout,
        groups=groups,
        needs=Needs(stock, groups),
        limits=limits or Limits(),
        allow=allow,
        costs=costs or SimpleCosts(),
        horizon_steps=horizon_steps,
    )
    order = held_slices_first(question.needs, groups, present)
    found: list[tuple[Candidate, Layout | None]] = []
    for axis in names:
        broken = broken_slices(layout.mesh, axis, present)
        best = {index: present[index] for index in sorted(order, key=broken.__contains__)}
        change = Change(mesh=layout.mesh, axis=axis, hosts_by_slice=best, devices_per_host=devices_per_host)
        found += measured_candidates(question, change)
    ranked = _ranked(found)
    first, chosen = ranked[0]
    return LayoutChoice(
        num_slices_before=layout.mesh.num_slices,
        horizon_steps=horizon_steps,
        candidates=tuple(candidate for candidate, _ in ranked),
        layout=None if first.refused else chosen,
    )


def _axes_to_change(layout: Layout, axes: tuple[str, ...] | None) -> tuple[str, ...]:
    wanted = dict.fromkeys((layout.elastic_axis, *spanning_axes(layout.mesh))) if axes is None else axes
    names = tuple(axis for axis in wanted if axis is not None)
    if not names:
        raise UsageError(
            "no axis of the mesh spans slices", remedy="Name one: Layout(elastic_axis=…) or axes=(…,)."
        )
    for axis in names:
        layout.mesh.axis_size(axis)
    return names


def _stock(layout: Layout, holdings: Stock | Iterable[Holding] | None) -> Stock:
    if holdings is None:
        return Stock.of_layout(layout)
    if isinstance(holdings, Stock):
        return holdings
    held = tuple(holdings)
    steps = {holding.step for holding in held}
    if len(steps) > 1:
        raise UsageError(f"the holdings are of several steps: {', '.join(map(str, sorted(steps)))}")
    return Stock.of_holdings(held, min(steps, default=0))


def _ranked(found: list[tuple[Candidate, Layout | None]]) -> list[tuple[Candidate, Layout | None]]:
    """Return the best first: of those that cost about the least, the one that asks least of the program."""

    def cost_s(pair: tuple[Candidate, Layout | None]) -> float:
        return math.inf if pair[0].cost_s is None else pair[0].cost_s

    ordered = sorted(found, key=lambda pair: (bool(pair[0].refused), cost_s(pair)))
    near = [
        pair
        for pair in ordered
        if not pair[0].refused and cost_s(pair) <= cost_s(ordered[0]) * (1 + SAME_COST)
    ]
    first = sorted(near, key=lambda pair: EASIEST.index(pair[0].kind))[:1]
    return first + [pair for pair in ordered if pair not in first]
