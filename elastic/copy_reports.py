"""Telling the checksums of what was captured, and now and then of all that the devices hold, so that copies
on different slices can be compared.
"""

from __future__ import annotations

from typing import Any

from elastic.audit_schedule import AuditSchedule
from elastic.ports import Link
from reshard.copies import pack_checksums
from reshard.ids import HostId
from snapshot.audit import Auditor
from snapshot.capture import CaptureStats


class CopyReports:
    """Reports of one world; every `audit_every`-th capture is an audit (0: only on order)."""

    def __init__(self, link: Link, generation: int, auditor: Auditor, audit_every: int) -> None:
        self._link = link
        self._generation = generation
        self._auditor = auditor
        self._schedule = AuditSchedule(audit_every)

    def tell(self, host: HostId, stats: CaptureStats) -> None:
        """Tell what one host has captured."""
        checksums = pack_checksums(stats.checksums)
        self._link.captured(host, self._generation, stats.step, checksums, is_audit=False)

    def audit_if_due(self, state: Any, step: int) -> None:
        """Tell the checksums of all that the devices hold of the state just captured, if it is its turn."""
        if self._schedule.take_due(step, self._link.audit_step(self._generation)):
            for host, checksums in self._auditor.checksums(state).items():
                self._link.captured(host, self._generation, step, checksums, is_audit=True)
