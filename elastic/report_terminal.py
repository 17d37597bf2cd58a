"""The recovery report in the terminal: what was lost, how long recoveries took, which promises held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from elastic.history_text import describe_kept_out, describe_suspect, format_seconds
from elastic.report_schema import PHASES, Recovery, Report
from elastic.terminal import open_console, titled_table
from reshard.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

RECOVERIES_A_TABLE = 6

_VERDICT_STYLES = {"held": "green", "broken": "bold red", "unknown": "yellow"}


def print_report(report: Report, console: Console | None = None, *, stream: TextIO | None = None) -> None:
    """Print a report; 100 columns wide where there is no terminal to ask."""
    if console is None:
        console = open_console(stream)
    console.print(render_report(report))


def render_report(report: Report) -> RenderableType:
    """The report as something rich can print."""
    from rich.console import Group

    parts: list[RenderableType] = [_headline(report), _losses_table(report)]
    for first in range(0, len(report.recoveries), RECOVERIES_A_TABLE):
        parts.append(_recoveries_table(report.recoveries[first : first + RECOVERIES_A_TABLE], first + 1))
    parts += _explanations(report)
    parts += [_invariants_table(report), _snapshots_line(report), *_kept_out(report)]
    return Group(*parts)


def _headline(report: Report) -> RenderableType:
    from rich.text import Text

    run = report.run
    text = Text()
    colour = "bold green" if run.outcome == "completed" else "bold red"
    text.append(f"Run {run.id} {run.outcome}", style=colour)
    hosts = f" of {run.hosts_per_slice} hosts" if run.hosts_per_slice > 1 else ""
    wall, started = format_seconds(run.wall_s), f"{run.slices} slices{hosts}, {run.adapter}, seed {run.seed}"
    text.append(f" in {wall} ({started}), goodput {report.goodput:.1%}")
    if report.final.loss is not None:
        text.append(f", final loss {report.final.loss:.4f}")
    if run.error:
        text.append(f"\n{run.error}", style="red")
    if run.simulated_faults:
        text.append(
            "\nFaults were simulated inside one process: no time here is one of a real recovery.",
            style="yellow",
        )
    return text


def _count(number: int, *, bad: bool) -> RenderableType:
    from rich.text import Text

    style = "" if not bad else ("green" if number == 0 else "bold red")
    return Text(f"{number:,}", style=style)


def _losses_table(report: Report) -> RenderableType:
    table = titled_table("What was lost", "", "done", "lost", "repeated", "replayed")
    steps, samples = report.steps, report.samples
    target = "" if steps.target is None else f" of {steps.target - steps.before:,}"
    if steps.before:
        target += f" (after {steps.before:,})"
    lost, repeated = _count(steps.lost, bad=True), _count(steps.repeated, bad=True)
    table.add_row("steps", f"{steps.committed:,}{target}", lost, repeated, _count(steps.replayed, bad=False))
    lost, repeated = _count(samples.lost, bad=True), _count(samples.repeated, bad=True)
    table.add_row("samples", f"{samples.consumed:,}", lost, repeated, "")
    return table


def _recoveries_table(recoveries: Sequence[Recovery], first: int) -> RenderableType:
    table = titled_table(
        "Recoveries", "", *(f"#{number}" for number in range(first, first + len(recoveries)))
    )
    rows = [
        ("how", [recovery.mode for recovery in recoveries]),
        ("generation", [str(recovery.generation) for recovery in recoveries]),
        ("lost / joined", [_change(recovery) for recovery in recoveries]),
        (
            "slices after",
            [", ".join(str(index) for index in recovery.slices_after) for recovery in recoveries],
        ),
        ("restored step", [_or_dash(recovery.restored_step) for recovery in recoveries]),
        ("replayed steps", [str(recovery.replayed_steps) for recovery in recoveries]),
        ("first new step", [_or_dash(recovery.resumed_step) for recovery in recoveries]),
        ("bytes moved", [format_bytes(recovery.bytes_moved) for recovery in recoveries]),
        ("lower bound", [format_bytes(recovery.bytes_lower_bound) for recovery in recoveries]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    table.add_section()
    for phase in PHASES:
        table.add_row(phase, *(format_seconds(getattr(recovery.phases_s, phase)) for recovery in recoveries))
    table.add_row("MTTR", *(format_seconds(recovery.mttr_s) for recovery in recoveries), style="bold")
    return table


def _change(recovery: Recovery) -> str:
    lost = [f"−{index}" for index in recovery.lost_slices]
    joined = [f"+{index}" for index in recovery.joined_slices]
    return " ".join(lost + joined) or "–"


def _or_dash(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _explanations(report: Report) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    return [
        Padding(Text(f"#{number} {recovery.explanation}"), (0, 0, 0, 2))
        for number, recovery in enumerate(report.recoveries, 1)
    ]


def _invariants_table(report: Report) -> RenderableType:
    from rich.text import Text

    table = titled_table("Invariants", "promise", "verdict")
    for name, verdict in report.invariants.items():
        table.add_row(name.replace("_", " "), Text(verdict, style=_VERDICT_STYLES[verdict]))
    return table


def _kept_out(report: Report) -> list[RenderableType]:
    from rich.text import Text

    return [Text(line, style="yellow") for line in describe_kept_out(report)]


def _snapshots_line(report: Report) -> RenderableType:
    from rich.text import Text

    snapshots = report.snapshots
    counts = f"{snapshots.captured:,} taken, {snapshots.verified:,} verified, {snapshots.rejected:,} refused"
    stall = f"p50 {format_seconds(snapshots.stall_s_p50)}, p99 {format_seconds(snapshots.stall_s_p99)}"
    if snapshots.skipped:
        counts += f", {snapshots.skipped:,} skipped"
    if snapshots.interval_steps > 1:
        counts += f"; every {snapshots.interval_steps:,} steps at the end"
    size = format_bytes(snapshots.bytes_per_host)
    text = Text(f"Snapshots: {counts}; {size} a host, {snapshots.replicas} replicas; stall {stall}")
    if snapshots.persisted or snapshots.persist_failed:
        step = snapshots.persisted_step
        newest = "" if step is None else f", the newest of step {step}"
        style = "red" if snapshots.persist_failed else ""
        written = f"{snapshots.persisted} written{newest}; {snapshots.persist_failed} failed"
        text.append(f"\nPersistent tier: {written}", style=style)
    compared = f"{snapshots.compared:,} captures and {snapshots.audits:,} audits compared across slices"
    text.append(f"\nCopies: {compared}")
    if not snapshots.disagreements:
        return text
    text.append(f", SILENT CORRUPTION found in {snapshots.disagreements:,}", style="bold red")
    for found in snapshots.corruptions:
        text.append(f"\n  since step {found.first_step}: {describe_suspect(found)}", style="red")
    return text
