"""The recoveries of a run: which worlds followed which losses, and how long each phase took.

Every world formed after the first one ends a recovery, unless the next world came before it committed a *new*
step (one beyond the newest committed before): then both are one recovery, and its cause lists all that
happened. How long it took is told by `history_phases`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.history_lineage import Execution, Lineage
from elastic.history_phases import Span, end_of, losses_between, measure_span
from elastic.history_text import explain_recovery, name_host
from elastic.records import (
    LossDetected,
    PhaseEntered,
    Record,
    RunEnded,
    StateRestored,
    WorldFormed,
)
from elastic.report_schema import PHASES, TIERS, PhaseTimes, Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A world that trains: where it stands in the history, and its first step beyond all committed before."""

    index: int
    formed: WorldFormed
    newest_before: int | None
    first_new: Execution | None


def real_worlds(records: Sequence[Record], lineage: Lineage) -> list[World]:
    """The worlds that train, in order."""
    formed = [
        (index, record)
        for index, record in enumerate(records)
        if isinstance(record, WorldFormed) and record.mode != "rehearsal"
    ]
    by_generation: dict[int, list[Execution]] = {}
    for execution in lineage.executions.values():
        by_generation.setdefault(execution.generation, []).append(execution)
    worlds: list[World] = []
    newest: int | None = None
    for index, world in formed:
        restored = world.restored_step
        newest = max((step for step in (newest, restored) if step is not None), default=None)
        own = by_generation.get(world.generation, [])
        fresh = [execution for execution in own if newest is None or execution.step > newest]
        first_new = min(fresh, key=lambda execution: execution.unix_s, default=None)
        worlds.append(World(index=index, formed=world, newest_before=newest, first_new=first_new))
        newest = max((step for step in (newest, *(e.step for e in own)) if step is not None), default=None)
    return worlds


def group_worlds(worlds: Sequence[World]) -> list[tuple[World, ...]]:
    """The worlds after the first one, those that were superseded together with the one that went on."""
    groups: list[tuple[World, ...]] = []
    pending: tuple[World, ...] = ()
    for world in worlds[1:]:
        pending = (*pending, world)
        if world.first_new is not None:
            groups.append(pending)
            pending = ()
    return [*groups, pending] if pending else groups


def build_recoveries(records: Sequence[Record], lineage: Lineage) -> tuple[list[Recovery], list[Span]]:
    """The recoveries, and the spans of time they took; a loss that no world followed has a span only."""
    worlds = real_worlds(records, lineage)
    recoveries, spans = [], []
    since = worlds[0].index if worlds else len(records)
    for group in group_worlds(worlds):
        recovery, span = _build_recovery(records, lineage, since, group)
        recoveries.append(recovery)
        spans.append(span)
        since = group[-1].index
    unanswered = losses_between(records, since, len(records))
    if (
        unanswered
        and not _is_completed(records)
        and (not recoveries or recoveries[-1].resumed_unix_s is not None)
    ):
        spans.append(measure_span(records, since, len(records), end_of(records), 0.0))
    return recoveries, spans


def _build_recovery(
    records: Sequence[Record], lineage: Lineage, since: int, group: tuple[World, ...]
) -> tuple[Recovery, Span]:
    final = group[-1]
    losses = losses_between(records, since, final.index)
    own = [lineage.executions[key] for key in lineage.executions if key[0] == final.formed.generation]
    resumed = _resumed_unix_s(records, lineage, final)
    end = end_of(records) if resumed is None else resumed
    first = min(own, key=lambda execution: execution.unix_s, default=None)
    span = measure_span(records, since, final.index, end, first.compile_s if first else 0.0)
    recovery = Recovery(
        generation=final.formed.generation,
        cause=_cause(losses, group) or _first_trouble(records, since, final.index),
        lost_slices=tuple(sorted({index for world in group for index in world.formed.lost})),
        joined_slices=tuple(sorted({index for world in group for index in world.formed.joined})),
        slices_after=final.formed.slices,
        mode=final.formed.mode,
        fault_unix_s=span.fault_unix_s,
        detected_unix_s=span.detected_unix_s,
        resumed_unix_s=resumed,
        mttd_s=span.detected_unix_s - span.fault_unix_s,
        mttr_s=None if resumed is None else max(0.0, resumed - span.fault_unix_s),
        phases_s=PhaseTimes(**{phase: span.seconds[phase] for phase in PHASES}),
        restored_step=final.formed.restored_step,
        resumed_step=final.first_new.step if final.first_new else None,
        replayed_steps=len(_replayed_in(lineage, group)),
        bytes_moved=final.formed.bytes_moved,
        bytes_lower_bound=final.formed.bytes_lower_bound,
        source_tiers=_source_tiers(records, final.formed.generation),
        explanation="",
    )
    explained = explain_recovery(recovery, losses, [world.formed for world in group])
    return _with_explanation(recovery, explained), span


def _with_explanation(recovery: Recovery, explanation: str) -> Recovery:
    fields = {name: getattr(recovery, name) for name in Recovery.__dataclass_fields__}
    return Recovery(**{**fields, "explanation": explanation})


def _is_completed(records: Sequence[Record]) -> bool:
    return any(isinstance(record, RunEnded) and record.outcome == "completed" for record in records)


def _cause(losses: Sequence[LossDetected], group: Sequence[World]) -> str:
    causes = dict.fromkeys(f"{name_host(loss)}: {loss.cause}" for loss in losses)
    for world in group:
        for index in world.formed.joined:
            causes[f"slice {index} joined"] = None
    return "; ".join(causes)


def _first_trouble(records: Sequence[Record], since: int, until: int) -> str:
    """Why a world was left that lost nobody: what the state machine said about it."""
    phases = [record for record in records[since + 1 : until] if isinstance(record, PhaseEntered)]
    reasons = [phase.why for phase in phases if phase.phase in ("SUSPECT", "FENCING") and phase.why]
    return next(iter(reasons), "the world was formed again")


def _resumed_unix_s(records: Sequence[Record], lineage: Lineage, final: World) -> float | None:
    """When the first new step was committed; without one, the last replayed step of a completed run."""
    if final.first_new is not None:
        return final.first_new.unix_s
    if not _is_completed(records):
        return None
    own = [e.unix_s for e in lineage.executions.values() if e.generation == final.formed.generation]
    return max(own, default=end_of(records))


def _replayed_in(lineage: Lineage, group: Sequence[World]) -> set[int]:
    generations = {world.formed.generation for world in group}
    own = {step for generation, step in lineage.executions if generation in generations}
    newest = group[-1].newest_before
    return {step for step in own & lineage.replayed if newest is not None and step <= newest}


def _source_tiers(records: Sequence[Record], generation: int) -> dict[str, int]:
    tiers = Counter(dict.fromkeys(TIERS, 0))
    for record in records:
        if isinstance(record, StateRestored) and record.generation == generation:
            tiers.update(record.bytes_from)
    return dict(tiers)
