"""The directory of one job in host memory: its name, its lock, and which files in it are ours.

    <root>/elastic-<job_id>/lock           exclusive, held by the launcher for the life of the job
    <root>/elastic-<job_id>/<host>/lock    shared, held by the agent and its worker

A job is alive as long as somebody holds one of these locks; the kernel gives them back when the
holders are gone, however they went.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import UsageError
from reshard.ids import HostId
from snapshot.shm import FileLock, check_root, make_directory

DEFAULT_ROOT = Path("/dev/shm")
JOB_PREFIX = "elastic-"
LOCK_NAME = "lock"
LOCK_TIMEOUT_S = 2.0

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_OWN_FILE = re.compile(
    r"((slot|buddy)\d+|stage|journal|pinned)(\.part)?(\.new)?|worker\.pid(\.new)?|agent\.sock", re.ASCII
)
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Removed:
    """What was taken out of host memory: the directories and their bytes."""

    directories: tuple[str, ...] = ()
    freed_bytes: int = 0


def job_directory(root: Path, job_id: str) -> Path:
    """Return the directory of a job. Raises UsageError for an id that is not a plain name."""
    if _JOB_ID.fullmatch(job_id) is None:
        raise UsageError(f"{job_id!r} is not a job id: letters, digits, '.', '_' and '-', at most 100")
    return root / f"{JOB_PREFIX}{job_id}"


def host_directories(job: Path) -> Iterator[tuple[HostId, Path]]:
    """Yield the hosts that have a directory in the job's, in order."""
    found: list[tuple[HostId, Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in job.iterdir():
            with contextlib.suppress(UsageError):
                host = HostId.parse(path.name)
                if path.is_dir() and not path.is_symlink():
                    found.append((host, path))
    yield from sorted(found)


class JobLock:
    """The launcher's hold on a job: while it lives, nobody else starts or removes this job."""

    def __init__(self, directory: Path, lock: FileLock) -> None:
        self.directory = directory
        self._lock = lock

    @classmethod
    def acquire(cls, job_id: str, *, root: Path = DEFAULT_ROOT) -> JobLock:
        """Make the job's directory and lock it. Raises UsageError when the job is already running."""
        check_root(root)
        directory = job_directory(root, job_id)
        lock = lock_in_directory(directory, shared=False, parents=())
        if lock is None:
            raise UsageError(
                f"job {job_id} is already running: another launcher holds {directory / LOCK_NAME}",
                remedy="Use another job id, or end that job first.",
                job_id=job_id,
            )
        return cls(directory, lock)

    def release(self) -> None:
        """Let go of the job, keeping its files: they are garbage once its agents are gone too."""
        self._lock.release()

    def unlink(self) -> Removed:
        """Remove all files of the job and let go of it; for a clean end, when its agents have ended."""
        removed = [remove_host_files(path) for _, path in host_directories(self.directory)]
        removed.append(remove_job_directory(self.directory))
        self._lock.release()
        return total(removed)


def lock_in_directory(directory: Path, *, shared: bool, parents: tuple[Path, ...]) -> FileLock | None:
    """Make `directory` (and `parents`, outermost first) and lock it; None when others keep it locked.

    A clean-up may remove the directory between the two: then make it again.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            for path in (*parents, directory):
                make_directory(path)
            return FileLock.acquire(directory / LOCK_NAME, shared=shared, timeout_s=LOCK_TIMEOUT_S)
    return None


def remove_host_files(directory: Path) -> Removed:
    """Remove our files from a host's directory, and it, unless foreign files are in it."""
    freed_bytes = 0
    for path in list(directory.iterdir()) if directory.is_dir() else []:
        if _OWN_FILE.fullmatch(path.name) and not path.is_dir():
            freed_bytes += _unlink(path)
    return _remove_directory(directory, freed_bytes)


def remove_job_directory(directory: Path) -> Removed:
    """Remove a job's own lock and directory, unless something is left in it."""
    return _remove_directory(directory, 0)


def remove_job_if_unused(directory: Path) -> None:
    """Remove a job's directory when no host is left in it and no launcher holds it."""
    with contextlib.suppress(FileNotFoundError):
        lock = FileLock.acquire(directory / LOCK_NAME, shared=False)
        if lock is not None and not any(True for _ in host_directories(directory)):
            remove_job_directory(directory)
        if lock is not None:
            lock.release()


def total(parts: list[Removed]) -> Removed:
    """Add up what was removed."""
    return Removed(
        tuple(sorted(name for part in parts for name in part.directories)),
        sum(part.freed_bytes for part in parts),
    )


def _remove_directory(directory: Path, freed_bytes: int) -> Removed:
    # The lock goes last: whoever waits for it then sees that its file has no name any more.
    _unlink(directory / LOCK_NAME)
    try:
        directory.rmdir()
    except OSError:
        return Removed((), freed_bytes)
    return Removed((str(directory),), freed_bytes)


def _unlink(path: Path) -> int:
    try:
        info = path.stat(follow_symlinks=False)
        path.unlink()
    except FileNotFoundError:
        return 0
    return info.st_blocks * 512
