"""Making room in an arena: when the worker asks for it, and before, when its slice is about to join."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.join_events import HostPrepared, PrepareHost
from reshard.errors import ElasticError
from reshard.layout import Layout
from reshard.redundancy import host_captures
from snapshot.arena import Arena
from snapshot.manifest import make_static
from snapshot.slot import required_bytes


class Preparer:
    """One at a time makes room; `prepare` does so in a thread and then tells."""

    def __init__(
        self, arena: Arena, member: int, replicas: int, tell: Callable[[HostPrepared], None]
    ) -> None:
        self._arena = arena
        self._member = member
        self._replicas = replicas
        self._tell = tell
        self._lock = threading.Lock()

    def reserve(self, slot_bytes: int, journal_record_bytes: int, journal_records: int) -> None:
        """See `Arena.reserve`."""
        with self._lock:
            self._arena.reserve(
                slot_bytes,
                journal_record_bytes=journal_record_bytes,
                journal_records=journal_records,
            )

    def prepare(self, command: PrepareHost) -> None:
        """Make room for what this host would capture in such a world."""
        threading.Thread(target=self._prepare, args=(command.layout,), name="prepare", daemon=True).start()

    def slot_bytes(self, layout: Layout) -> int:
        """The size of a slot for this host's share of a snapshot, as its worker will want it."""
        host = self._arena.host
        return required_bytes(make_static(host, layout, host_captures(layout, host, self._replicas)))

    def _prepare(self, layout: Layout) -> None:
        error = ""
        try:
            self.reserve(self.slot_bytes(layout), 0, 0)
        except (ElasticError, OSError) as failed:
            error = str(failed)
        self._tell(HostPrepared(member=self._member, error=error))
