"""Plans as JSON, and as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from reshard.errors import UsageError
from reshard.grid import BoxTable, Column
from reshard.holdings import TIERS
from reshard.ids import HostId
from reshard.plan_rows import ArrayClass, PlanGroup, Rows, check_rows

_Boxes = list[list[int]]


class _ClassJson(msgspec.Struct):
    paths: tuple[str, ...]
    itemsize: int
    edges: list[list[int]]


class _GroupJson(msgspec.Struct):
    classes: list[_ClassJson]
    low: _Boxes
    high: _Boxes
    rows: dict[str, list[int]]


class _PlanJson(msgspec.Struct):
    step: int
    hosts: list[str]
    bytes_lower_bound: int
    groups: list[_GroupJson]


def to_json(step: int, hosts: Sequence[HostId], groups: Sequence[PlanGroup], bytes_lower_bound: int) -> bytes:
    """Return a plan's parts as one JSON object."""
    return msgspec.json.encode(
        _PlanJson(
            step=step,
            hosts=[str(host) for host in hosts],
            bytes_lower_bound=bytes_lower_bound,
            groups=[_group_json(group) for group in groups],
        )
    )


def from_json(data: bytes | str) -> tuple[int, tuple[HostId, ...], tuple[PlanGroup, ...], int]:
    """Read what `to_json` wrote; raises `UsageError` naming the first thing that does not fit."""
    try:
        plan = msgspec.json.decode(data, type=_PlanJson)
        hosts = tuple(HostId.parse(host) for host in plan.hosts)
        if plan.step < 0 or len(set(hosts)) < len(hosts):
            raise ValueError("its step is below zero, or a host is listed twice")
        return plan.step, hosts, tuple(map(_group, plan.groups)), plan.bytes_lower_bound
    except (msgspec.MsgspecError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise UsageError(f"this is not a plan: {error}") from error


def _group_json(group: PlanGroup) -> _GroupJson:
    classes = [_ClassJson(c.paths, c.itemsize, [along.tolist() for along in c.edges]) for c in group.classes]
    rows = {name: column.tolist() for name, column in group.rows.columns().items()}
    return _GroupJson(classes, group.boxes.low.tolist(), group.boxes.high.tolist(), rows)


def _group(group: _GroupJson) -> PlanGroup:
    rank = len(group.classes[0].edges)
    classes = tuple(
        ArrayClass(
            paths=c.paths, itemsize=c.itemsize, edges=tuple(np.array(along, np.int64) for along in c.edges)
        )
        for c in group.classes
    )
    boxes = BoxTable(low=_boxes(group.low, rank), high=_boxes(group.high, rank))
    rows = Rows(**{name: np.array(column, np.int64) for name, column in group.rows.items()})
    check_rows(classes, boxes, rows)
    return PlanGroup(classes=classes, boxes=boxes, rows=rows)


def _boxes(boxes: _Boxes, rank: int) -> Column:
    return np.array(boxes, np.int64).reshape(len(boxes), rank)


def describe_routes(hosts: Sequence[HostId], groups: Sequence[PlanGroup], max_routes: int) -> Iterator[str]:
    """Yield the lines of a table: the routes that a plan uses, with transfers and bytes of each."""
    counts: dict[tuple[int, int, int], int] = {}
    nbytes: dict[tuple[int, int, int], int] = {}
    for group in groups:
        rows = group.rows
        routes, number = np.unique(
            np.stack((rows.target, rows.source, rows.tier)), axis=1, return_inverse=True
        )
        in_route = np.bincount(number, weights=rows.stop - rows.first).astype(np.int64)
        moved = np.zeros(routes.shape[1], np.int64)
        np.add.at(moved, number, group.nbytes)
        for at, (target, source, tier) in enumerate(routes.T.tolist()):
            route = target, source, tier
            counts[route] = counts.get(route, 0) + int(in_route[at])
            nbytes[route] = nbytes.get(route, 0) + int(moved[at])
    shown = sorted(sorted(nbytes, key=lambda route: (-nbytes[route], route))[:max_routes])
    yield f"{'target':<10} {'source':<10} {'from':<10} {'transfers':>9} {'bytes':>18}"
    for target, source, tier in shown:
        route = target, source, tier
        origin = "itself" if target == source else str(hosts[source])
        yield f"{hosts[target]!s:<10} {origin:<10} {TIERS[tier]:<10} {counts[route]:>9} {nbytes[route]:>18,}"
    if len(shown) < len(nbytes):
        rest = sum(nbytes.values()) - sum(nbytes[route] for route in shown)
        yield f"and {len(nbytes) - len(shown):,} more routes with {rest:,} bytes"
