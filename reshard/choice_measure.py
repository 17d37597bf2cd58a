"""Candidates measured: what each layout in question takes and costs, and why it cannot be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from reshard.candidates import Alike, Change, Draft, Groups, Kind, drafts, layout_of, mixed_draft
from reshard.choice_figures import Candidate, Costs, Figures, Limits, figures_of
from reshard.choice_text import refuse_memory
from reshard.layout import Layout
from reshard.needs import Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What candidates are measured by."""

    layout: Layout
    groups: Groups
    needs: Needs[Alike]
    limits: Limits
    allow: frozenset[Kind]
    costs: Costs
    horizon_steps: int


def measured_candidates(question: Question, change: Change) -> Iterator[tuple[Candidate, Layout | None]]:
    """Yield the candidates of one axis; where replicating all takes too much memory, also a mixture."""
    by_kind: dict[Kind, Candidate] = {}
    for draft in drafts(change, question.groups):
        candidate, layout = _measured(question, change, draft)
        by_kind[candidate.kind] = candidate
        yield candidate, layout
    limit = question.limits.device_memory_bytes
    replicated = by_kind.get("replicate")
    if limit is None or replicated is None or not replicated.refused or "pad" not in question.allow:
        return
    budget_bytes = int(limit / question.limits.state_factor)
    mixed = mixed_draft(change, len(replicated.slices), question.groups, budget_bytes)
    if mixed is not None:
        yield _measured(question, change, mixed)


def _measured(question: Question, change: Change, draft: Draft) -> tuple[Candidate, Layout | None]:
    """Return the draft as a candidate, with figures, and its layout, where there is one."""
    idle = tuple(index for index in sorted(change.hosts_by_slice) if index not in draft.slices)
    candidate = Candidate(
        kind=draft.kind,
        axis=draft.axis,
        axis_size=draft.axis_size,
        slices=draft.slices,
        idle=idle,
        fallbacks=draft.fallbacks,
        refused=draft.refused,
    )
    if draft.refused:
        return candidate, None
    mesh = change.mesh_on(draft.slices)
    layout = layout_of(draft, question.layout, mesh)
    figures = figures_of(
        draft,
        mesh,
        question.groups,
        question.needs,
        num_devices_before=question.layout.mesh.num_devices,
        limits=question.limits,
    )
    step_s, move_s = question.costs.step_s(layout, figures), question.costs.move_s(layout, figures)
    measured = replace(
        candidate,
        figures=figures,
        step_s=step_s,
        move_s=move_s,
        cost_s=move_s + question.horizon_steps * step_s,
    )
    return replace(measured, refused=_refusal(measured, figures, question)), layout


def _refusal(candidate: Candidate, figures: Figures, question: Question) -> str:
    """Return why a candidate that exists cannot be chosen, "" when it can."""
    needed: set[Kind] = {candidate.kind}
    if candidate.kind == "replicate-and-pad":
        needed = {"replicate", "pad"}
    if candidate.idle:
        needed.add("fewer-slices")
    if missing := sorted(needed - question.allow):
        return f"{' and '.join(missing)} not allowed here"
    return refuse_memory(candidate, figures, question.limits)
