"""What a history tells of comparing copies across slices: how often, and which were found to differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.records import CopiesCompared, CorruptionSuspected, Record, WorldFormed, of_kind
from elastic.report_schema import Corruption, Verdict

MAX_CORRUPTIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAudit:
    """Comparisons of captures and audits of devices, those with a finding, and the arrays found."""

    compared: int
    audits: int
    disagreements: int
    corruptions: tuple[Corruption, ...]
    unhealed: int = 0
    """Findings that no later world went back behind: what was computed since may carry them on."""

    @property
    def verdict(self) -> Verdict:
        """Whether all copies compared agree, of what was not given up since; unknown without any."""
        if self.unhealed:
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
        unhealed=_num_unhealed(records),
    )


def _num_unhealed(records: Sequence[Record]) -> int:
    """Findings in worlds after which none was restored from a step at which copies still agreed."""
    first: dict[int, int] = {}
    open_findings: list[CorruptionSuspected] = []
    for record in records:
        if isinstance(record, CorruptionSuspected):
            open_findings.append(record)
            first[record.generation] = min(record.step, first.get(record.generation, record.step))
        elif isinstance(record, WorldFormed) and record.mode != "rehearsal":
            step = -1 if record.restored_step is None else record.restored_step
            open_findings = [found for found in open_findings if step >= first[found.generation]]
    return len(open_findings)
