"""Appending to a run's history from several threads, and after another process has."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from elastic.records import Record, encode_record

MAX_RECORD_BYTES = 16 << 20
"""No record is longer: so far from the end a torn one is looked for."""


class HistoryWriter:
    """Appends records to `events.jsonl`; a record is one write, so that a reader never sees half of one in
    the middle. What a writer before this one has left of a record is cut off.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._cut_torn_end()

    def write(self, record: Record) -> None:
        """Append one record; it is in the file when this returns."""
        with self._lock:
            if not self._file.closed:
                self._file.write(encode_record(record))

    def size(self) -> int:
        """How many bytes of history there are."""
        return self._path.stat().st_size

    def lines_from(self, offset: int) -> list[bytes]:
        """The records from a place on, as lines; none from beyond the end."""
        with self._path.open("rb") as file:
            file.seek(offset)
            return file.readlines()

    def sync(self) -> None:
        """Have on disk what was written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; later records are dropped."""
        with self._lock:
            self._file.close()

    def _cut_torn_end(self) -> None:
        size = self.size()
        with self._path.open("rb") as file:
            file.seek(max(size - MAX_RECORD_BYTES, 0))
            end = file.read()
        if end and not end.endswith(b"\n"):
            self._file.truncate(size - len(end) + end.rfind(b"\n") + 1)
