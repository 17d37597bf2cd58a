"""The recovery report as one self-contained HTML page: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.history_text import (
    describe,
    describe_kept_out,
    describe_suspect,
    format_seconds,
    format_slices,
)
from elastic.records import (
    CoordinatorStarted,
    CorruptionSuspected,
    FaultInjected,
    LossDetected,
    MessageRefused,
    Record,
    RunEnded,
    RunStarted,
    SliceQuarantined,
    SnapshotRejected,
    StragglerOver,
    StragglerSeen,
    WorldFormed,
)
from elastic.report_charts import draw_losses, draw_timeline
from elastic.report_schema import PHASES, Badput, PhaseTimes, Recovery, Report
from reshard.sizes import format_bytes

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = Path(__file__).with_name("report_page.html")
MAX_EVENTS = 200

_NOTABLE = (
    RunStarted,
    CoordinatorStarted,
    FaultInjected,
    LossDetected,
    WorldFormed,
    SnapshotRejected,
    CorruptionSuspected,
    SliceQuarantined,
    StragglerSeen,
    StragglerOver,
    MessageRefused,
    RunEnded,
)

_PROMISES = {
    "no_step_lost": "No committed optimizer step was lost",
    "no_step_repeated": "No optimizer step was applied twice",
    "no_sample_lost": "No sample was skipped",
    "no_sample_repeated": "No sample was used twice in an epoch",
    "restored_equals_captured": "Restored state equals the captured state, bit for bit",
    "one_group_at_a_time": "Never did two groups go on at once",
    "journals_agree": "All slices wrote down the same samples for each step",
    "plan_minimal": "No more bytes were moved than had to be",
    "copies_agree": "Copies of the state on different slices are the same, bit for bit",
}


def render_html(report: Report, records: Sequence[Record] = ()) -> str:
    """The page. Timeline, loss curve and events need the history and are left out without it."""
    started = datetime.fromtimestamp(report.run.started_unix_s, tz=UTC)
    return _load_template().render(
        report=report,
        timeline=draw_timeline(records, report) if records else None,
        losses=draw_losses(records) if records else None,
        shares=[_phase_shares(recovery) for recovery in report.recoveries],
        badput=[(name, getattr(report.badput_s, name)) for name in Badput.__dataclass_fields__],
        promises=[(_PROMISES.get(name, name), verdict) for name, verdict in report.invariants.items()],
        events=_events(records, report.run.started_unix_s),
        started=started.strftime("%Y-%m-%d %H:%M:%S UTC"),
        worst_mttr_s=max((r.mttr_s for r in report.recoveries if r.mttr_s is not None), default=None),
        phases=PHASES,
        kept_out=describe_kept_out(report),
        corruptions=[
            f"since step {found.first_step}: {describe_suspect(found)}"
            for found in report.snapshots.corruptions
        ],
    )


def write_html(report: Report, path: Path, records: Sequence[Record] = ()) -> Path:
    """Write the page to `path` and return it."""
    path.write_text(render_html(report, records), encoding="utf-8")
    return path


def _load_template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        seconds=format_seconds,
        size=format_bytes,
        slices=format_slices,
        phase=lambda times, name: getattr(times, name),
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _phase_shares(recovery: Recovery) -> list[tuple[str, float, float]]:
    """Each phase's name, seconds, and per cent of the recovery's whole."""
    times: PhaseTimes = recovery.phases_s
    seconds = [(phase, float(getattr(times, phase))) for phase in PHASES]
    total = sum(value for _, value in seconds) or 1.0
    return [(phase, value, round(100 * value / total, 3)) for phase, value in seconds]


def _events(records: Sequence[Record], start: float) -> list[tuple[str, str]]:
    notable = [record for record in records if isinstance(record, _NOTABLE)]
    return [(f"{record.unix_s - start:.2f} s", describe(record)) for record in notable[:MAX_EVENTS]]
