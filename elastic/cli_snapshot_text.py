"""What `elastic snapshot …` prints for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reshard.boxes import format_box
from reshard.layout import ArrayLayout, Spec
from snapshot.array_summary import ArraySummary
from snapshot.gc import JobInfo
from snapshot.locate import FoundJob
from snapshot.survey import SlotInfo
from snapshot.verification import Damage, Disagreement, Verification
from snapshot.view import View

MIN_WIDTH = 100


def print_jobs(listed: Iterable[tuple[JobInfo, Sequence[SlotInfo]]]) -> None:
    """Print each job and a table of its slots."""
    for job, slots in listed:
        alive = "live" if job.is_alive else "dead"
        hosts = ", ".join(map(str, job.hosts)) or "no hosts"
        _print(f"{job.directory}: {alive}, {hosts}, {job.used_bytes / 1e6:.1f} MB")
        if slots:
            rows = [_slot_row(slot) for slot in slots]
            _print_table(
                ("host", "slot", "step", "generation", "shards", "data", "state"), rows, right=(2, 3, 4, 5)
            )


def print_verification(job: FoundJob, found: Verification) -> None:
    """Print what is covered by whom, and what is wrong."""
    _print(f"job {job.job_id} in {job.directory}")
    rows = [
        (
            str(snapshot.step),
            str(snapshot.generation),
            ", ".join(snapshot.hosts) or "-",
            str(snapshot.num_shards),
            f"{snapshot.verified_bytes / 1e6:.1f} MB",
            "yes" if snapshot.is_covered else "no: lacks " + _first(snapshot.missing),
        )
        for snapshot in found.snapshots
    ]
    if rows:
        names = ("step", "generation", "hosts", "intact shards", "verified", "covered")
        _print_table(names, rows, right=(0, 1, 3, 4))
    for damage in found.damages:
        _print(f"damaged: {describe_damage(damage)}")
    for disagreement in found.disagreements:
        _print(f"copies differ: {describe_disagreement(disagreement)}")
    if found.overwritten:
        _print(f"not judged, the job overwrote them while they were read: {', '.join(found.overwritten)}")
    if not rows and found.is_sound:
        _print("no complete snapshot was found")
    elif found.is_sound:
        _print("all that was read is intact, and all copies agree")


def describe_damage(damage: Damage) -> str:
    """Name the slot or the shard, and the reason."""
    where = f"{damage.host}/{damage.slot}"
    if damage.path is None:
        return f"{where}: {damage.reason}"
    box = "" if damage.box is None else f" {format_box(damage.box)}"
    return f"{where}: {damage.path}{box} of step {damage.step}: {damage.reason}"


def describe_disagreement(found: Disagreement) -> str:
    """Name array, box and step, and who has what."""
    groups = "; ".join(f"{', '.join(names)} have {key}" for key, names in found.hosts_by_checksum.items())
    suspects = f"; most likely wrong: {', '.join(found.suspects)}" if found.suspects else ""
    return f"{found.path} {format_box(found.box)} of step {found.step}: {groups}{suspects}"


def print_arrays(view: View, arrays: Sequence[ArrayLayout]) -> None:
    """Print the step and a table of the arrays."""
    total = sum(array.nbytes for array in arrays)
    _print(
        f"job {view.job.job_id}: step {view.step} of generation {view.generation}, "
        f"{len(arrays)} arrays, {total / 1e6:.1f} MB"
    )
    rows = [
        (array.path, str(array.shape), array.dtype, format_spec(array.spec), f"{array.nbytes:,}")
        for array in arrays
    ]
    _print_table(("path", "shape", "dtype", "spec", "bytes"), rows, right=(4,))


def print_array(view: View, path: str, summary: ArraySummary, out: Path | None) -> None:
    """Print the summary of one array."""
    array = view.info(path)
    _print(f"{path}: {array.dtype}{array.shape}, spec {format_spec(array.spec)}, {array.nbytes:,} bytes")
    _print(f"  step {view.step} of generation {view.generation}")
    if summary.mean is not None:
        _print(f"  min {summary.min:g}, max {summary.max:g}, mean {summary.mean:g}")
    if summary.num_nan:
        _print(f"  NaN: {summary.num_nan:,} of {summary.num_elements:,} elements")
    _print(f"  first values: {', '.join(summary.first_values) or 'none, it is empty'}")
    if out is not None:
        _print(f"  saved to {out}")


def format_spec(spec: Spec) -> str:
    """Write a partition spec like JAX does: `(data, -)`, a dash for a dim that is not partitioned."""
    return f"({', '.join('+'.join(axes) or '-' for axes in spec)})"


def _slot_row(slot: SlotInfo) -> tuple[str, ...]:
    if slot.state != "complete":
        return (
            slot.host,
            slot.slot,
            "-",
            "-",
            "-",
            "-",
            slot.state + (f": {slot.reason}" if slot.reason else ""),
        )
    return (
        slot.host,
        slot.slot,
        str(slot.step),
        str(slot.generation),
        str(slot.num_shards),
        f"{(slot.data_bytes or 0) / 1e6:.1f} MB",
        "complete, newest covered" if slot.is_newest_covered else "complete",
    )


def _first(missing: Sequence[tuple[str, tuple[tuple[int, int], ...]]]) -> str:
    path, box = missing[0]
    return f"{path} {format_box(box)}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")


def _print_table(names: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # plain text: the names of arrays have brackets, which are markup
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(table)


def _print(line: str) -> None:
    Console(soft_wrap=True).print(Text(line))
