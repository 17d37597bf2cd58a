"""Appending to a run's history from several threads."""

from __future__ import annotations

import threading
from pathlib import Path

from elastic.records import Record, encode_record


class HistoryWriter:
    """Appends records to `events.jsonl`; a record is one write, so that a reader never sees half of one in
    the middle.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        """Append one record; it is in the file when this returns."""
        with self._lock:
            if not self._file.closed:
                self._file.write(encode_record(record))

    def close(self) -> None:
        """Close the file; later records are dropped."""
        with self._lock:
            self._file.close()
