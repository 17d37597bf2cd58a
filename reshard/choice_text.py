"""A layout choice in words: one line for a report, and all of it for a person who decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reshard.candidates import Fallback
from reshard.choice_figures import Candidate, Figures, Limits
from reshard.sizes import format_bytes

if TYPE_CHECKING:
    from reshard.choice import LayoutChoice

MAX_NAMED = 3
"""Arrays, or slices, that a sentence names; how many more there are it counts."""


def summarise(choice: LayoutChoice) -> str:
    """Return the choice, or why there is none, in one line."""
    chosen = choice.chosen
    if chosen is None:
        first = choice.candidates[0]
        reasons = dict.fromkeys(f"{_name(one)}: {one.refused}" for one in choice.candidates)
        return f"no layout for {_count(_num_present(first), 'slice')}: {'; '.join(reasons)}"
    return "; ".join([_name(chosen), *map(describe_fallback, chosen.fallbacks)])


def describe(choice: LayoutChoice) -> str:
    """Return every candidate with its figures, its fallbacks and the reason why it is not the one."""
    num_present = _num_present(choice.candidates[0])
    lines = [f"From {_count(choice.num_slices_before, 'slice')} to {num_present}:"]
    for candidate in choice.candidates:
        if candidate is choice.chosen:
            verdict = "chosen"
        else:
            verdict = f"refused, {candidate.refused}" if candidate.refused else "possible"
        lines.append(f"- {_name(candidate)} ({candidate.kind}): {verdict}")
        lines += [f"    {line}" for line in _details(candidate, choice.horizon_steps)]
    return "\n".join(lines)


def describe_fallback(fallback: Fallback) -> str:
    """Return what is done about a dim that does not divide, and what the program must do for it."""
    named = ", ".join(fallback.paths[:MAX_NAMED])
    num_more = len(fallback.paths) - MAX_NAMED
    arrays = f"{named} and {num_more} more" if num_more > 0 else named
    problem = f"dim {fallback.dim} ({fallback.size:,}) of {arrays} does not divide into {fallback.num_parts}"
    if fallback.kind == "replicate":
        return f"{problem}: replicated over the axis"
    num_empty = fallback.num_empty
    empty = f"; its last {num_empty} parts are empty" if num_empty > 1 else ""
    empty = "; its last part is empty" if num_empty == 1 else empty
    must = "the program must store it so, as JAX refuses uneven shards" if fallback.is_new else "as before"
    padding = fallback.stored_size - fallback.size
    return f"{problem}: padded to {fallback.stored_size:,}, {padding:,} of them empty ({must}){empty}"


def refuse_memory(candidate: Candidate, figures: Figures, limits: Limits) -> str:
    """Return which memory is too small for a candidate, "" when all of it fits."""
    needed = limits.device_bytes(figures.device_bytes)
    available = limits.device_memory_bytes
    if available is not None and needed > available:
        hint = ""
        if candidate.kind == "replicate" and candidate.axis_size > figures.num_slices:
            hint = f"; a mesh with an axis of its own for slices would keep the rest of {candidate.axis!r}"
        return f"a device needs {format_bytes(needed)} and has {format_bytes(available)}{hint}"
    available = limits.host_memory_bytes
    if available is not None and figures.snapshot_bytes > available:
        needed_text, there = format_bytes(figures.snapshot_bytes), format_bytes(available)
        return f"snapshots need {needed_text} a host, which has {there}"
    return ""


def _num_present(candidate: Candidate) -> int:
    return len(candidate.slices) + len(candidate.idle)


def _name(candidate: Candidate) -> str:
    where = f"on {_count(len(candidate.slices), 'slice')}"
    if len(candidate.idle) > MAX_NAMED:
        where += f", {len(candidate.idle)} slices idle"
    elif candidate.idle:
        where += f", slice{'s' * (len(candidate.idle) > 1)} {', '.join(map(str, candidate.idle))} idle"
    if not candidate.axis_size:
        return f"axis {candidate.axis!r} {where}"
    parts = [f"{candidate.axis}={candidate.axis_size} {where}"]
    for kind, done in (("replicate", "replicated"), ("pad", "padded")):
        paths = {path for one in candidate.fallbacks if one.kind == kind for path in one.paths}
        parts += [f"{_count(len(paths), 'array')} {done}"] if paths else []
    return ", ".join(parts)


def _details(candidate: Candidate, horizon_steps: int) -> Iterator[str]:
    figures = candidate.figures
    if figures is None:
        return
    for fallback in candidate.fallbacks:
        yield describe_fallback(fallback)
    state, snapshots = format_bytes(figures.device_bytes), format_bytes(figures.snapshot_bytes)
    moved, to_one = format_bytes(figures.bytes_moved), format_bytes(figures.host_bytes_received)
    yield f"{state} of state a device, {snapshots} of snapshots a host; {moved} to move, {to_one} to one host"
    yield (
        f"a step of {candidate.step_s:.4g} s and {candidate.move_s:.4g} s to get there: "
        f"{candidate.cost_s:.4g} s with {horizon_steps:,} steps"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
