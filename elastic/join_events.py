"""What coordinator and agent say to each other before a slice joins a world that trains."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareHost:
    """Make room for the snapshots that this host would take in a world laid out like this one."""

    member: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPrepared:
    """There is room; or `error` says why not (its worker will say it again when it needs it)."""

    member: int
    error: str = ""
