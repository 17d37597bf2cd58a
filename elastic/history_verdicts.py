"""Which of the engine's promises a history shows held, broken, or leaves unknown.

A verdict is *held* only if everything the promise speaks about is in the history and agrees; *broken* as soon
as one record contradicts it; *unknown* where the evidence is missing. A promise about restores holds in a run
without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.history_copies import audit_copies
from elastic.history_lineage import Lineage
from elastic.history_samples import SampleAudit, disagreeing_journals
from elastic.records import Record, RestoreChecked, StepCommitted, WorldFormed, of_kind
from elastic.report_schema import Verdict


def judge(records: Sequence[Record], lineage: Lineage, audit: SampleAudit) -> dict[str, Verdict]:
    """All verdicts by name."""
    any_commit = bool(lineage.executions)
    return {
        "no_step_lost": _verdict(broken=bool(lineage.lost), known=any_commit and lineage.end_known),
        "no_step_repeated": _verdict(broken=bool(lineage.doubled), known=any_commit),
        "no_sample_lost": _verdict(broken=audit.lost > 0, known=audit.lost_known),
        "no_sample_repeated": _verdict(broken=audit.repeated > 0, known=audit.repeated_known),
        "restored_equals_captured": _judge_restores(records),
        "one_group_at_a_time": _verdict(broken=bool(lineage.stale), known=any_commit),
        "journals_agree": _verdict(
            broken=bool(disagreeing_journals(lineage.executions.values())),
            known=any_commit and all(c.sample_ids for e in lineage.executions.values() for c in e.commits),
        ),
        "plan_minimal": _judge_plans(records),
        "copies_agree": audit_copies(records).verdict,
    }


def _verdict(*, broken: bool, known: bool) -> Verdict:
    if broken:
        return "broken"
    return "held" if known else "unknown"


def _restores(records: Iterable[Record]) -> list[WorldFormed]:
    worlds = of_kind(records, WorldFormed)
    return [world for world in worlds if world.mode != "rehearsal" and world.restored_step is not None]


def _judge_restores(records: Sequence[Record]) -> Verdict:
    """Every restore that a step was run on must have been checked, not that of a world given up before."""
    compared = [
        check for check in of_kind(records, RestoreChecked) if check.captured_digest and check.restored_digest
    ]
    if any(check.captured_digest != check.restored_digest for check in compared):
        return "broken"
    trained = {commit.generation for commit in of_kind(records, StepCommitted)}
    checked = {check.generation for check in compared}
    restored = {world.generation for world in _restores(records)}
    return "unknown" if (restored & trained) - checked else "held"


def _judge_plans(records: Sequence[Record]) -> Verdict:
    restores = _restores(records)
    return _verdict(broken=any(w.bytes_moved != w.bytes_lower_bound for w in restores), known=True)
