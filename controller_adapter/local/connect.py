"""Opening the local engine in a training process, and cleaning up behind it however the session ends."""

from __future__ import annotations

import contextlib
import os
import weakref

from controller_adapter.local import control
from controller_adapter.local.engine import LocalEngine, run_started
from controller_adapter.local.link import LocalLink
from controller_adapter.local.runtime import LocalRuntime
from elastic.history import HistoryWriter
from elastic.job import HISTORY_FILE, JobSpec
from elastic.ports import Link, Runtime
from elastic.records import read_history
from elastic.report import build_report, write_report
from snapshot.job import JobLock

_live: Embedded | None = None


class Embedded:
    """A job that lives in this process: its engine, and what has to be put away after it.

    Without a launcher (`lock` is then this process's own) the report is written here too.
    """

    def __init__(self, spec: JobSpec, lock: JobLock | None) -> None:
        self._spec = spec
        self._lock = lock
        self._pid = os.getpid()
        history = HistoryWriter(spec.directory / HISTORY_FILE)
        if lock is not None:
            history.write(run_started(spec))
        self.engine = LocalEngine(spec, history, self.close)

    def close(self) -> None:
        """End the job if it has not ended, and remove its memory. Harmless twice, and in a fork."""
        global _live
        if os.getpid() != self._pid:
            return
        if _live is self:
            _live = None
        self.engine.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.unlink()
            records = list(read_history(self._spec.directory / HISTORY_FILE))
            with contextlib.suppress(OSError):  # its directory was removed meanwhile
                write_report(build_report(records), self._spec.directory)


def connect(spec: JobSpec) -> tuple[Link, Runtime]:
    """The link and the runtime of a session; ends what an earlier session of this process left behind.

    Raises UsageError when the job is running elsewhere, or there are too few devices.
    """
    global _live
    if _live is not None:
        _live.close()
    runtime = LocalRuntime(spec)
    launcher = control.inherited()
    lock = None
    if launcher is None:
        lock = JobLock.acquire(spec.job_id, root=spec.shm_root)
        (spec.directory / HISTORY_FILE).unlink(missing_ok=True)
    _live = embedded = Embedded(spec, lock)
    if launcher is not None:
        control.serve(launcher, embedded.engine)
    link = LocalLink(embedded.engine)
    weakref.finalize(link, embedded.close)  # when the session is forgotten, at the latest when Python ends
    return link, runtime


def live_engine() -> LocalEngine | None:
    """The engine of this process's session, None without one."""
    return None if _live is None else _live.engine
