"""Commit at recovery: which snapshot the survivors go back to, and what has to move for it.

Nobody waits for a global commit while training. At recovery the newest step is taken for which the
survivors' verified shards cover every box of every array. Shards of one step are only put together when they
were captured in the same generation, and only when no later world went back behind it: lineages never mix.
Copies of one box that differ are no copies: see `elastic.sift`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.copy_check import Named
from elastic.events import SnapshotSummary
from elastic.expected import Expected, expect_layout
from elastic.members import member_of
from elastic.sift import sift
from reshard.coverage import uncovered_at
from reshard.holdings import Holding, Shard
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.lineage import is_on_lineage
from reshard.plan import Plan
from reshard.planner import make_plan
from reshard.stock import Stock
from reshard.transfer import Transfer

WHOLE_AXIS = "whole"
MAX_REASONS = 4
"""Reasons that a sentence gives; how many more there are it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The snapshot to restore: step, generation, layout, who holds what of it, and the data position.

    `left_out` are copies of it that must not be read: others contradict them.
    """

    step: int
    generation: int
    layout: Layout
    holdings: tuple[Holding, ...]
    position: int = 0
    left_out: tuple[Holding, ...] = ()
    is_persisted: bool = False
    """Whether it is read from the persistent tier: no host holds it in memory."""


def choose_restore(
    snapshots: Mapping[HostId, Iterable[SnapshotSummary]],
    restored_steps: Mapping[int, int],
    named: Named = frozenset(),
    differed_since: tuple[int, int] | None = None,
) -> tuple[Choice | None, str]:
    """Return the newest snapshot that is covered and on the lineage, and a sentence on how it was chosen.

    `restored_steps` maps the generation of each world that was entered to the step it was restored from.
    `named` are copies found wrong by a majority (`elastic.copy_check`). A copy that most slices contradict is
    left out; a snapshot whose copies differ without a majority is only taken when no older one is better. So
    are those of a generation from the step on at which copies began to differ in it (`differed_since`): steps
    since may have been computed from the wrong ones.
    """
    groups: dict[tuple[int, int], list[SnapshotSummary]] = defaultdict(list)
    for host in sorted(snapshots):
        for summary in snapshots[host]:
            groups[summary.step, summary.generation].append(summary)
    refused: list[str] = []
    doubtful: tuple[Choice, str] | None = None
    for (step, generation), group in sorted(groups.items(), reverse=True):
        if not is_on_lineage(step, generation, restored_steps):
            refused.append(f"step {step} of generation {generation} was left behind by a later world")
            continue
        layout = group[0].layout
        holdings = tuple(holding for summary in group for holding in summary.holdings)
        sifted = sift(holdings, generation, named)
        gaps = uncovered_at(layout.arrays, sifted.kept, step=step)
        if gaps:
            refused.append(f"step {step} lacks boxes of {len(gaps)} arrays, among them {next(iter(gaps))}")
            continue
        choice = Choice(
            step=step,
            generation=generation,
            layout=layout,
            holdings=sifted.kept,
            position=group[0].position,
            left_out=sifted.left_out,
        )
        num_hosts = len({holding.host for holding in sifted.kept})
        why = f"step {step} is whole in the memory of {num_hosts} host{'s' * (num_hosts > 1)}"
        if sifted.refused:
            why = f"{why} ({_shorten(sifted.refused)})"
        doubts = sifted.doubts + _since(step, generation, differed_since)
        if not doubts:
            return choice, "; ".join([why, *refused])
        doubt = f"step {step} cannot be trusted: {_shorten(doubts)}"
        doubtful = doubtful or (choice, f"{why}; {doubt}; nothing older is whole and agrees")
        refused.append(doubt)
    if doubtful is not None:
        return doubtful
    return None, "; ".join(refused) or "no host holds a complete snapshot"


def _since(step: int, generation: int, differed_since: tuple[int, int] | None) -> tuple[str, ...]:
    if differed_since is None or generation != differed_since[0] or step < differed_since[1]:
        return ()
    return (f"copies differed from step {differed_since[1]} on, and steps were computed from them",)


def _shorten(reasons: tuple[str, ...]) -> str:
    more = len(reasons) - MAX_REASONS
    return ", ".join(reasons[:MAX_REASONS]) + (f" and {more} more" if more > 0 else "")


def choose_persisted(
    persisted: Iterable[SnapshotSummary], restored_steps: Mapping[int, int]
) -> Choice | None:
    """Return the newest snapshot of the persistent tier that is on the job's lineage, None without one."""
    on_lineage = [s for s in persisted if is_on_lineage(s.step, s.generation, restored_steps)]
    newest = max(on_lineage, key=lambda s: (s.step, s.generation), default=None)
    if newest is None:
        return None
    return Choice(
        step=newest.step,
        generation=newest.generation,
        layout=newest.layout,
        holdings=(),
        position=newest.position,
        is_persisted=True,
    )


def plan_restore(
    choice: Choice, hosts: tuple[HostId, ...], devices_per_host: int, told: Mapping[int, Layout] | None = None
) -> tuple[Expected, Plan]:
    """The layout that the script is expected to ask for on these hosts, which are in rank order (`told`: see
    `expect_layout`), and the plan that fills it with the snapshot; an empty plan for a persisted one.

    Raises UsageError where there is no layout, MissingShardError where a part of the state is nowhere.
    """
    held = Stock.of_holdings(choice.holdings, choice.step)
    target = expect_layout(choice.layout, hosts, devices_per_host, told=told or {}, held=held)
    target = target.in_order(hosts)
    if choice.is_persisted:
        return target, Plan.empty(choice.step)
    return target, make_plan(target.layout, held, step=choice.step)


def plan_whole(layout: Layout, holdings: Iterable[Holding], step: int, host: HostId) -> tuple[Layout, Plan]:
    """The plan that brings every array whole to one host (for a digest of the state)."""
    mesh = MeshLayout(axis_names=(WHOLE_AXIS,), axis_sizes=(1,), hosts=(host,))
    arrays = tuple(
        ArrayLayout(
            path=array.path,
            shape=array.shape,
            dtype=array.dtype,
            itemsize=array.itemsize,
            spec=((),) * len(array.shape),
        )
        for array in layout.arrays
    )
    target = Layout(mesh=mesh, arrays=arrays, elastic_axis=None)
    return target, make_plan(target, holdings, step=step)


def other_holders(
    transfers: Iterable[Transfer], holdings: Iterable[Holding], hosts_per_slice: int = 1, *, most: int = 2
) -> tuple[tuple[int, ...], ...]:
    """For each transfer, at most `most` other members that hold the same shard: where to turn if its source
    fails.

    Neither source nor target of the transfer. They are not the same ones for each source, to spread the load.
    """
    holders: dict[Shard, set[int]] = defaultdict(set)
    wanted = tuple(transfers)
    shards = {(transfer.path, transfer.source_box) for transfer in wanted}
    for holding in holdings:
        if (holding.path, holding.box) in shards:
            holders[holding.path, holding.box].add(member_of(holding.host, hosts_per_slice))
    return tuple(
        _next_after(
            member_of(transfer.source, hosts_per_slice),
            holders[transfer.path, transfer.source_box] - {member_of(transfer.target, hosts_per_slice)},
            most,
        )
        for transfer in wanted
    )


def _next_after(source: int, holders: set[int], most: int) -> tuple[int, ...]:
    others = sorted(holders - {source})
    later = [index for index in others if index > source]
    return tuple((later + [index for index in others if index < source])[:most])
