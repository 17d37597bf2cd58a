"""Which holdings of one snapshot can be trusted, when copies differ though each fits its own checksum."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.copy_check import Named
from reshard.copies import Copy, judge_copies
from reshard.holdings import Holding, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Sifted:
    """`kept` holdings are the same wherever a box has several copies; `left_out` are the others.

    `refused` says which copies are wrong, and why; `doubts` for which boxes nothing tells which copy is good.
    """

    kept: tuple[Holding, ...]
    left_out: tuple[Holding, ...]
    refused: tuple[str, ...]
    doubts: tuple[str, ...]


def sift(holdings: Sequence[Holding], generation: int, named: Named) -> Sifted:
    """Leave out copies that a majority of slices contradicts, and those of `named` arrays where others are.

    All `holdings` are of one step, captured in `generation`. Where two copies differ and nothing more is
    known, those on the slices that differ least are kept (then those of the lowest slice), so that all
    restore the same.
    """
    named_on: defaultdict[str, set[int]] = defaultdict(set)
    for of_generation, path, slice_index in named:
        if of_generation == generation:
            named_on[path].add(slice_index)
    by_shard = _worth_a_look(holdings, named_on)
    if not by_shard:
        return Sifted(kept=tuple(holdings), left_out=(), refused=(), doubts=())
    good: dict[Shard, int] = {}
    reasons: dict[str, set[str]] = {"refused": set(), "doubts": set()}
    open_shards: list[Shard] = []
    for shard, copies in by_shard.items():
        verdict = _decide(shard, copies, named_on[shard[0]])
        if verdict is None:
            open_shards.append(shard)
            continue
        good[shard], reason = verdict
        if reason:
            reasons["refused"].add(reason)
    counts = Counter(holding.host.slice_index for shard in open_shards for holding in by_shard[shard])
    for shard in open_shards:
        copies = by_shard[shard]
        bad = named_on[shard[0]]
        best = min(copies, key=lambda h: (h.host.slice_index in bad, counts[h.host.slice_index], h.host))
        good[shard] = best.checksum
        reasons["doubts"].add(_doubt(shard[0], copies, best))
    kept = tuple(h for h in holdings if good.get((h.path, h.box), h.checksum) == h.checksum)
    return Sifted(
        kept=kept,
        left_out=tuple(h for h in holdings if good.get((h.path, h.box), h.checksum) != h.checksum),
        refused=tuple(sorted(reasons["refused"])),
        doubts=tuple(sorted(reasons["doubts"])),
    )


def _worth_a_look(holdings: Iterable[Holding], named_on: dict[str, set[int]]) -> dict[Shard, list[Holding]]:
    """The boxes whose copies differ, or that only slices have whose copies of the array were found wrong."""
    first: dict[Shard, int] = {}
    differing: set[Shard] = set()
    only_bad: dict[Shard, bool] = {}
    for holding in holdings:
        shard = (holding.path, holding.box)
        if first.setdefault(shard, holding.checksum) != holding.checksum:
            differing.add(shard)
        if named_on:
            is_bad = holding.host.slice_index in named_on.get(holding.path, ())
            only_bad[shard] = only_bad.get(shard, True) and is_bad
    looked_at = differing | {shard for shard, is_bad in only_bad.items() if is_bad}
    found: defaultdict[Shard, list[Holding]] = defaultdict(list)
    for holding in holdings if looked_at else ():
        if (holding.path, holding.box) in looked_at:
            found[holding.path, holding.box].append(holding)
    return dict(sorted(found.items()))


def _decide(shard: Shard, copies: list[Holding], bad: set[int]) -> tuple[int, str] | None:
    """The checksum of the good copies and why others are refused; None when nothing tells."""
    judged = judge_copies(*shard, {Copy(holding.host): holding.checksum for holding in copies})
    if judged is not None and judged.good is not None:
        num_slices = len(judged.slices)
        who = ", ".join(map(str, judged.suspects))
        return judged.good, f"{shard[0]} of slice {who} refused: minority of {num_slices} copies"
    others = {holding.checksum for holding in copies if holding.host.slice_index not in bad}
    if len(others) == 1:
        who = ", ".join(str(i) for i in sorted({h.host.slice_index for h in copies} & bad))
        return others.pop(), f"{shard[0]} of slice {who} refused: an audit found it wrong"
    return None


def _doubt(path: str, copies: list[Holding], best: Holding) -> str:
    slices = sorted({holding.host.slice_index for holding in copies})
    if len(slices) == 1:
        return f"{path} is only on slice {slices[0]}, where an audit found it wrong"
    who = " and ".join(map(str, slices))
    return f"copies of {path} differ on slices {who}, to take would be that of slice {best.host.slice_index}"
