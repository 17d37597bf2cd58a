"""The writer process: `python -m snapshot.persist_writer`, one job on its input, reports on its output.

A process of its own, of the lowest priority, so that neither the worker's steps nor the agent's heartbeats
wait for a disk. It ends when its input closes: when its agent is gone or wants it to stop. Killed at any
moment it leaves nothing but the staging directory.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from snapshot.contents import open_source
from snapshot.persist import prune
from snapshot.persist_errors import write_error
from snapshot.persist_jobs import (
    Done,
    FinishJob,
    Progress,
    Report,
    WriteJob,
    decode_job,
    encode_line,
    failed,
)
from snapshot.source import ShardSource

EXIT_STOPPED = 3
_NICE = 19  # Linux derives the priority of its disk requests from it too


def main() -> int:
    """Read a job, do it, report; return the exit status."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_exit_with_input, daemon=True).start()
    source: ShardSource | None = None
    try:
        job = decode_job(line)
        if isinstance(job, WriteJob):
            source = open_source(map(Path, job.slots), job.step, (job.generation,))
            done = _write(job, source)
        else:
            done = _finish(job)
    except Exception as error:
        known = write_error(error, "the persistent tier")
        _say(failed(known, source.rejected if source is not None else None))
        return known.exit_status
    _say(done)
    return 0


def _write(job: WriteJob, source: ShardSource) -> Done:
    from snapshot.persist_store import write_shards

    written = write_shards(
        Path(job.staging),
        job.layout,
        job.tree,
        job.shards,
        source,
        on_progress=lambda nbytes: _say(Progress(written_bytes=nbytes)),
    )
    return Done(written_bytes=written)


def _finish(job: FinishJob) -> Done:
    from snapshot.persist_finish import finish

    root = Path(job.root)
    result = finish(root, Path(job.staging), job.facts, restored_steps=job.restored_steps)
    removed = () if job.keep is None else prune(root, job.keep, job.restored_steps)
    return Done(
        path=str(result.path), generation=result.generation, removed=tuple(one.step for one in removed)
    )


def _exit_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1 << 16):  # unbuffered: at exit a thread must not hold a lock of stdin
        pass
    os._exit(EXIT_STOPPED)


def _say(report: Report) -> None:
    sys.stdout.buffer.write(encode_line(report))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    raise SystemExit(main())
