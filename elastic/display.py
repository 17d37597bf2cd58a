"""A running job in the terminal: live on a terminal, plain lines anywhere else.

    with LiveDisplay() as display:
        display.feed(record)          # each record as it is written

It shares its cores with the training, so it draws at most three times a second, and it never raises: when it
cannot show something it goes silent.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO, cast

from elastic.display_screens import ForgivingStream, PlainScreen, RichScreen, Screen
from elastic.display_state import JobView
from elastic.history_text import describe
from elastic.records import (
    CoordinatorStarted,
    CorruptionSuspected,
    FaultInjected,
    LossDetected,
    PersistFailed,
    PhaseEntered,
    Record,
    RestoreChecked,
    RunEnded,
    RunStarted,
    SnapshotPersisted,
    SnapshotRejected,
    WorkerEvent,
    WorldFormed,
)

_IMPORTANT = (
    RunStarted,
    FaultInjected,
    LossDetected,
    WorldFormed,
    SnapshotRejected,
    PersistFailed,
    SnapshotPersisted,
    RunEnded,
)
_SAID_PHASES = ("FENCING", "WAITING", "FAILED")


def is_important(record: Record) -> bool:
    """Whether a person watching the job wants to read a line about this record."""
    if isinstance(record, PhaseEntered):
        return record.phase in _SAID_PHASES
    if isinstance(record, CoordinatorStarted):
        return bool(record.phase)  # the first one is part of the start
    if isinstance(record, WorkerEvent):
        return record.state in ("ended", "adopted", "overdue")
    if isinstance(record, RestoreChecked):
        return record.captured_digest != record.restored_digest
    if isinstance(record, CorruptionSuspected):
        return record.is_audit  # copies that differ once differ at each step: what an audit says is enough
    return isinstance(record, _IMPORTANT)


class LiveDisplay:
    """Shows the records of a running job on `stream`, by default standard output."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = ForgivingStream(sys.stdout if stream is None else stream)
        self._clock = clock
        self._view = JobView()
        self._lock = threading.Lock()
        self._screen: Screen | None = None

    def __enter__(self) -> Self:
        try:
            self._screen = self._open_screen()
        except Exception:  # see the module's docstring
            self._screen = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def feed(self, record: Record) -> None:
        """Take in the next record of the history."""
        if self._screen is None:
            return
        try:
            with self._lock:
                recovered = self._view.feed(record)
            if is_important(record) and not self._is_part_of_the_start(record):
                self._screen.say(describe(record))
            if recovered:
                self._screen.say(recovered)
            self._screen.update(record)
            if self._stream.broken:
                self.close()
        except Exception:  # see the module's docstring
            self.close()

    def close(self) -> None:
        """Leave the terminal as it was; the last view stays on it."""
        screen, self._screen = self._screen, None
        if screen is None:
            return
        try:
            screen.close()
        except Exception:  # see the module's docstring
            return

    def _is_part_of_the_start(self, record: Record) -> bool:
        """Fencing before there was a world is nothing to tell: every start begins so."""
        return isinstance(record, PhaseEntered) and record.phase == "FENCING" and not self._view.world

    def _open_screen(self) -> Screen:
        from rich.console import Console

        console = Console(file=cast(TextIO, self._stream))
        if console.is_terminal and not console.is_dumb_terminal:
            return RichScreen(self._view, console, self._lock)
        return PlainScreen(self._view, self._stream, self._clock)
