"""Coordinators that took over from one that died or hung, as the history tells them."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.records import CoordinatorStarted, Record
from elastic.report_schema import Takeover


def takeovers(records: Sequence[Record]) -> tuple[Takeover, ...]:
    """All of them, in order. The time without a coordinator is that since the last thing written before."""
    found = []
    newest_unix_s: float | None = None
    for record in records:
        if isinstance(record, CoordinatorStarted) and record.phase:
            found.append(
                Takeover(
                    epoch=record.epoch,
                    unix_s=record.unix_s,
                    phase=record.phase,
                    goes_on=record.goes_on,
                    away_s=max(0.0, record.unix_s - (newest_unix_s or record.unix_s)),
                )
            )
        newest_unix_s = max(newest_unix_s or record.unix_s, record.unix_s)
    return tuple(found)
