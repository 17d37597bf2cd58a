"""Removing what dead jobs left in host memory, and nothing else."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from reshard.ids import HostId
from snapshot.job import (
    DEFAULT_ROOT,
    JOB_PREFIX,
    LOCK_NAME,
    Removed,
    host_directories,
    remove_host_files,
    remove_job_directory,
    total,
)
from snapshot.shm import DIRECTORY_MODE, FileLock, check_root

EMPTY_AGE_S = 3600.0
"""How old an empty directory with the name of a job must be to be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job that has files in host memory; alive while somebody holds one of its locks."""

    job_id: str
    directory: str
    is_alive: bool
    hosts: tuple[HostId, ...]
    used_bytes: int


def list_jobs(root: Path = DEFAULT_ROOT) -> tuple[JobInfo, ...]:
    """Return the jobs that have files below `root`, by id."""
    jobs = []
    for directory in _job_directories(root):
        with contextlib.ExitStack() as stack:
            jobs.append(
                JobInfo(
                    job_id=directory.name.removeprefix(JOB_PREFIX),
                    directory=str(directory),
                    is_alive=not _lock_all(directory, stack, make=False),
                    hosts=tuple(host for host, _ in host_directories(directory)),
                    used_bytes=_used_bytes(directory),
                )
            )
    return tuple(jobs)


def collect(root: Path = DEFAULT_ROOT) -> Removed:
    """Remove the files of every dead job below `root`; return what went and the bytes freed.

    A job is dead when its own lock and those of all its hosts are free. They are held while the files
    go, so a job that starts with the same id waits, and two clean-ups at once do not meet. Foreign
    files and directories stay, also in the directory of a dead job. An empty directory with the name of a
    job goes when it is an hour old.
    """
    removed: list[Removed] = []
    for directory in _job_directories(root):
        with contextlib.ExitStack() as stack:
            if not _lock_all(directory, stack, make=True):
                continue
            removed += [remove_host_files(path) for _, path in host_directories(directory)]
            removed.append(remove_job_directory(directory))
    return total(removed)


def find_garbage(root: Path = DEFAULT_ROOT) -> Removed:
    """Return what `collect` would remove now, and remove nothing."""
    found: list[Removed] = []
    for directory in _job_directories(root):
        with contextlib.ExitStack() as stack:
            if _lock_all(directory, stack, make=False):
                paths = (directory, *(path for _, path in host_directories(directory)))
                found.append(Removed(tuple(map(str, paths)), _used_bytes(directory)))
    return total(found)


def _job_directories(root: Path) -> list[Path]:
    """Return the directories that are a job's by name and by content."""
    check_root(root)
    candidates = [path for path in root.iterdir() if path.name.startswith(JOB_PREFIX)]
    return sorted(path for path in candidates if path.is_dir() and not path.is_symlink() and _is_job(path))


def _is_job(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        if (directory / LOCK_NAME).is_file() or any(True for _ in host_directories(directory)):
            return True
        # What a clean-up leaves that was killed before its very last call. Not at once: an empty directory
        # of such a name may also be one that somebody has just made.
        info = directory.stat()
        is_ours = info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) == DIRECTORY_MODE
        is_old = time.time() - info.st_mtime > EMPTY_AGE_S
        return is_ours and is_old and not any(True for _ in directory.iterdir())
    return False


def _lock_all(directory: Path, stack: contextlib.ExitStack, *, make: bool) -> bool:
    """Take the locks of the job's hosts and the job's own, if all are free.

    The job's own comes last, so that none is made in the directory of a live job. Without `make`, a lock
    file that does not exist counts as free.
    """
    for path in (*(path for _, path in host_directories(directory)), directory):
        try:
            lock = FileLock.acquire(path / LOCK_NAME, shared=False, make=make)
        except FileNotFoundError:
            if make:  # the directory went meanwhile: another clean-up
                return False
            continue
        except OSError:  # another user's
            return False
        if lock is None:
            return False
        stack.callback(lock.release)
    return True


def _used_bytes(directory: Path) -> int:
    used_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        for _, path in host_directories(directory):
            used_bytes += sum(file.lstat().st_blocks * 512 for file in path.iterdir())
    return used_bytes
