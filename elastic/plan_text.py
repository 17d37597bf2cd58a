"""What `elastic plan` prints for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Group, RenderableType
from rich.text import Text

from elastic.history_text import format_names, format_seconds, format_slices
from elastic.plan_report import Assessment, Load, Move, Outcome, Step
from elastic.terminal import open_console, titled_table
from reshard.sizes import format_bytes

CHANGES_A_TABLE = 3


def print_assessment(assessment: Assessment, *, stream: TextIO | None = None) -> None:
    """Print the answer; 100 columns wide where there is no terminal to ask."""
    open_console(stream).print(render(assessment))


def render(assessment: Assessment) -> RenderableType:
    """Return the answer as something rich can print."""
    parts: list[RenderableType] = [_headline(assessment), _memory_table(assessment)]
    groups = group_alike(assessment.outcomes)
    going_on = [group for group in groups if group[0].move is not None]
    parts += [_stopped(group) for group in groups if group[0].move is None]
    for first in range(0, len(going_on), CHANGES_A_TABLE):
        parts.append(_moves_table(going_on[first : first + CHANGES_A_TABLE], assessment))
    parts += _explanations(groups)
    parts.append(_closing(assessment))
    return Group(*parts)


def group_alike(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Return the outcomes together that differ in bytes and times only, in order of the first of each."""
    groups: defaultdict[object, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        missing = None if outcome.missing is None else outcome.missing.path
        layouts = tuple((c.kind, c.axis_size, len(c.slices), bool(c.refused)) for c in outcome.candidates)
        groups[outcome.event, len(outcome.slices), outcome.verdict, missing, layouts].append(outcome)
    return list(groups.values())


def name_cases(cases: Iterable[tuple[int, ...]]) -> str:
    """Name the slices of equal cases: `slice 3`, `any of slices 0–31`, `slices 3 and 7 at once`."""
    listed = sorted(cases)
    if any(len(case) > 1 for case in listed):
        return "; ".join(f"slices {format_names(case)} at once" for case in listed)
    indices = [case[0] for case in listed]
    if len(indices) == 1:
        return f"slice {indices[0]}"
    return f"any of slices {format_names(_ranges(indices))}"


def _ranges(indices: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def _headline(assessment: Assessment) -> RenderableType:
    found = assessment.described
    text = Text(f"{assessment.title}\n" if assessment.title else "", style="bold")
    mesh = " × ".join(f"{name}={size}" for name, size in found.mesh.items())
    text.append(
        f"{_count(found.slices, 'slice')} of {found.accelerator}, {_count(found.hosts, 'host')}, "
        f"{_count(found.devices, 'chip')}; "
        f"mesh {mesh}\n{_count(found.arrays, 'array')}, {format_bytes(found.state_bytes)} of state",
        style="not bold",
    )
    step = assessment.step
    if step.seconds is not None:
        known = f"; a step of {format_seconds(step.seconds)} ({assessment.step_note}), bound by {step.bound}"
        text.append(known, style="not bold")
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _fit(fits: bool | None) -> Text:
    if fits is None:
        return Text("not known", style="yellow")
    return Text("fits", style="green") if fits else Text("does not fit", style="bold red")


def _memory_table(assessment: Assessment) -> RenderableType:
    table = titled_table("Memory, on the fullest", "", "needed", "there is", "")
    device, host = assessment.device_memory, assessment.host_memory
    table.add_row(
        "device: the state alone"
        if device.state_factor == 1
        else f"device: {device.state_factor:g} × the state",
        format_bytes(round(device.total_bytes)),
        _limit(device.limit_bytes),
        _fit(device.fits),
    )
    table.add_row(
        "host: snapshots in /dev/shm",
        format_bytes(host.total_bytes),
        _limit(host.limit_bytes),
        _fit(host.fits),
    )
    table.add_row(f"  {host.slots} slots of its own", format_bytes(host.slots * host.captured_bytes), "", "")
    if host.copies_bytes:
        copies = format_bytes(host.copies_slots * host.copies_bytes)
        table.add_row(f"  {host.copies_slots} slots of copies for other slices", copies, "", "")
    table.add_row("  what a recovery fetches", format_bytes(host.stage_bytes), "", "")
    if host.persisted_bytes:
        table.add_row("  one on its way to disk", format_bytes(host.persisted_bytes), "", "")
    return table


def _limit(limit_bytes: float | None) -> str:
    return "–" if limit_bytes is None else format_bytes(round(limit_bytes))


def _stopped(group: Sequence[Outcome]) -> RenderableType:
    names = name_cases(outcome.slices for outcome in group)
    first = group[0]
    text = Text(f"Losing {names}: ")
    if first.missing is not None:
        text.append("state is gone. ", style="bold red")
        text.append(first.missing.message)
    else:
        text.append("the job does not go on. ", style="bold red")
        text.append(first.reason)
    return text


def _moves_table(groups: Sequence[Sequence[Outcome]], assessment: Assessment) -> RenderableType:
    names = [_change(group, assessment.only_checked) for group in groups]
    table = titled_table("What a change moves", "", *names)
    moves = [[outcome.move for outcome in group if outcome.move is not None] for group in groups]
    rows = [
        ("bytes moved", [_span([m.bytes_moved for m in group]) for group in moves]),
        ("lower bound", [_span([m.bytes_lower_bound for m in group]) for group in moves]),
        ("copied within hosts", [_span([m.bytes_local for m in group]) for group in moves]),
        ("busiest source", [_load(group, "busiest_source") for group in moves]),
        ("busiest target", [_load(group, "busiest_target") for group in moves]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    table.add_section()
    for phase in moves[0][0].phases:
        table.add_row(phase.name, *(_phase(group, phase.name) for group in moves))
    table.add_row("without a new step", *(_downtime(group) for group in moves), style="bold")
    table.add_section()
    table.add_row("step afterwards", *(_step(group[0].step, assessment.step) for group in moves))
    table.add_row("device memory", *(_fit(group[0].device_memory.fits) for group in moves))
    table.add_row("host memory", *(_fit(group[0].host_memory.fits) for group in moves))
    return table


def _change(group: Sequence[Outcome], only_checked: Sequence[int]) -> str:
    """Name a column; slices that were not planned stand beside those that were."""
    cases = [outcome.slices for outcome in group]
    if group[0].event == "return":
        return f"return of {name_cases(cases)}"
    return f"losing {name_cases([*cases, *((index,) for index in only_checked)])}"


def _span(values: Sequence[int]) -> str:
    low, high = format_bytes(min(values)), format_bytes(max(values))
    return low if low == high else f"{low} – {high}"


def _load(moves: Sequence[Move], name: str) -> str:
    loads: list[Load] = [load for move in moves if (load := getattr(move, name)) is not None]
    if not loads:
        return "–"
    most = max(loads, key=lambda load: load.nbytes)
    return f"{most.host}: {format_bytes(most.nbytes)}"


def _phase(moves: Sequence[Move], name: str) -> str:
    seconds = [phase.seconds for move in moves for phase in move.phases if phase.name == name]
    known = [value for value in seconds if value is not None]
    return format_seconds(max(known)) if known else "–"


def _downtime(moves: Sequence[Move]) -> str:
    worst = max(moves, key=lambda move: move.downtime_s)
    is_whole = all(phase.seconds is not None for phase in worst.phases)
    return ("" if is_whole else "≥ ") + format_seconds(worst.downtime_s)


def _step(step: Step, before: Step) -> str:
    """The step and how much longer it is; by its compute alone where no time is known."""
    if step.seconds is None or before.seconds is None:
        return f"× {step.ratio:.3f}"
    return f"{format_seconds(step.seconds)} (× {step.seconds / before.seconds:.3f})"


def _explanations(groups: Sequence[Sequence[Outcome]]) -> list[RenderableType]:
    """Return how the layout was chosen, for the first of each group; all of one are chosen alike."""
    return [
        Text(f"The layout after losing {format_slices(group[0].slices)}. {group[0].explanation}")
        for group in groups
        if group[0].explanation
    ]


def _closing(assessment: Assessment) -> RenderableType:
    text = Text()
    first = next((found.move for found in assessment.outcomes if found.move is not None), None)
    if first is not None:
        for phase in first.phases:
            text.append(f"{phase.name}: {phase.bound}\n", style="dim")
    if assessment.only_checked:
        planned = [found.slices[0] for found in assessment.outcomes if found.event == "loss"]
        text.append(
            f"Planned for the loss of slices {format_names(planned)}; of the others it was checked that "
            f"nothing is gone with them (--every-slice plans them too).\n"
        )
    if assessment.goodput is None:
        text.append(f"Goodput: {assessment.goodput_note}")
    else:
        note = f" ({assessment.goodput_note})" if assessment.goodput_note else ""
        text.append(f"Goodput: {assessment.goodput:.2%}{note}", style="bold")
    return text
