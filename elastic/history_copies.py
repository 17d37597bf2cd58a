"""What a history tells of comparing copies across slices: how often, and which were found to differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.records import CopiesCompared, CorruptionSuspected, Record, of_kind
from elastic.report_schema import Corruption, Verdict

MAX_CORRUPTIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAudit:
    """Comparisons of captures and audits of devices, those with a finding, and the arrays found."""

    compared: int
    audits: int
    disagreements: int
    corruptions: tuple[Corruption, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether all copies that were compared agree; unknown when none were."""
        if self.disagreements:
            return "broken"
        return "held" if self.compared + self.audits else "unknown"


def audit_copies(records: Sequence[Record]) -> CopyAudit:
    """Count the comparisons; an array is listed once, with the step at which it was first seen to differ.

    What a majority has found about an array counts more than what two copies could not decide.
    """
    told = of_kind(records, CopiesCompared)
    findings = of_kind(records, CorruptionSuspected)
    by_path: dict[str, Corruption] = {}
    for finding in findings:
        for box in finding.boxes:
            found = Corruption(
                first_step=finding.step,
                path=box.path,
                box=box.box,
                slices=box.slices,
                suspects=box.suspects,
                is_majority=box.is_majority,
                devices=box.devices if box.is_majority else (),
            )
            known = by_path.setdefault(box.path, found)
            if found.is_majority and not known.is_majority:
                by_path[box.path] = replace(found, first_step=min(known.first_step, found.first_step))
    ordered = sorted(
        by_path.values(), key=lambda found: (not found.is_majority, found.first_step, found.path)
    )
    return CopyAudit(
        compared=sum(record.num_captures for record in told if not record.is_audit),
        audits=sum(record.num_captures for record in told if record.is_audit),
        disagreements=len(findings),
        corruptions=tuple(ordered[:MAX_CORRUPTIONS]),
    )
