"""Files in host memory: room, allocation that fails cleanly, and locks that die with their holder.

Plain files and `flock`, not `multiprocessing.shared_memory`: its resource tracker removes memory
that other processes still use, and a file under /dev/shm outlives the process that wrote it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
from pathlib import Path

from reshard.errors import InsufficientMemoryError, UsageError
from snapshot.pages import fault_in, fill_with_huge_pages, huge_page_setting

PAGE_BYTES = 4096
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOCK_RETRY_S = 0.01


def align(value: int, to: int) -> int:
    """Round `value` up to a multiple of `to`."""
    return -(-value // to) * to


def available_bytes(root: Path) -> int:
    """Return the bytes an unprivileged process can still allocate in the file system of `root`."""
    info = os.statvfs(root)
    return info.f_bavail * info.f_frsize


def check_root(root: Path) -> None:
    """Raise UsageError unless `root` is a directory in which this process can make files."""
    if not root.is_dir():
        raise UsageError(
            f"snapshot memory {root} is not a directory", remedy="Mount a tmpfs there or name another root."
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise UsageError(
            f"snapshot memory {root} is not writable by user {os.geteuid()}",
            remedy="Change its mode or name another root.",
        )


def require_bytes(root: Path, needed_bytes: int) -> None:
    """Raise InsufficientMemoryError unless `needed_bytes` more fit below `root`."""
    available = available_bytes(root)
    if needed_bytes > available:
        raise insufficient(root, needed_bytes, available)


def insufficient(path: Path, needed_bytes: int, available: int) -> InsufficientMemoryError:
    """Build the error for an allocation at `path` that does not fit."""
    return InsufficientMemoryError(needed_bytes, available, str(path))


def make_directory(path: Path) -> None:
    """Make `path` (one level) readable by its owner only; an existing directory of our user is kept, its mode
    put right. Raises UsageError when something else is there.
    """
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(
                f"{path} exists and is not a directory", remedy="Remove it or use another job id."
            ) from None
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"{path} is of another user ({found.st_uid})",
                remedy="Use another job id, or another directory for snapshots.",
            ) from None
        if stat.S_IMODE(found.st_mode) != DIRECTORY_MODE:
            path.chmod(DIRECTORY_MODE)


def open_regular(path: Path, flags: int) -> int:
    """Open an existing regular file and return its descriptor; never blocks, never follows a link.

    Raises OSError when there is no such file, ValueError when it is not a regular file.
    """
    fd = os.open(path, flags | _OPEN_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path} is not a regular file")
    return fd


def allocate_file(path: Path, nbytes: int, head: bytes) -> None:
    """Make (or replace) `path` as a file of `nbytes` whose pages all exist, starting with `head`.

    The file appears under its name only when complete. Allocation is by `posix_fallocate`, because
    growing by `ftruncate` beyond the tmpfs succeeds and kills the later writer with SIGBUS. Where the mount
    gives huge pages on request (`huge=advise`), they are asked for first. Raises InsufficientMemoryError,
    leaving the old file as it was.
    """
    nbytes = align(nbytes, PAGE_BYTES)
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    available = available_bytes(path.parent)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, FILE_MODE)
    try:
        if huge_page_setting(fd) == "advise":
            fill_with_huge_pages(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        os.pwrite(fd, head, 0)
        os.rename(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise insufficient(path, nbytes, available) from error
    finally:
        os.close(fd)


def grow_file(path: Path, nbytes: int) -> None:
    """Make an existing file at least `nbytes` long, its content kept. Raises InsufficientMemoryError.

    Then its size is what it was: who has it mapped never sees it shrink.
    """
    nbytes = align(nbytes, PAGE_BYTES)
    fd = open_regular(path, os.O_RDWR)
    try:
        before_bytes = os.fstat(fd).st_size
        if before_bytes < nbytes:
            available = available_bytes(path.parent)
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                if os.fstat(fd).st_size > before_bytes:
                    os.ftruncate(fd, before_bytes)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise insufficient(path, nbytes - before_bytes, available) from error
    finally:
        os.close(fd)


def map_writable(path: Path) -> tuple[mmap.mmap, tuple[int, int, int]]:
    """Map a whole existing file for writing, pages faulted in; also return its (device, inode, bytes).

    Raises InsufficientMemoryError when the file has pages that do not exist and cannot be made.
    """
    fd = open_regular(path, os.O_RDWR)
    try:
        info = os.fstat(fd)
        mapping = mmap.mmap(fd, info.st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    try:
        fault_in(mapping)
    except OSError as error:
        mapping.close()
        raise insufficient(path, info.st_size, available_bytes(path.parent)) from error
    return mapping, (info.st_dev, info.st_ino, info.st_size)


class FileLock:
    """A `flock` on a file, released by the kernel when the last holder of its descriptor is gone."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd

    @classmethod
    def acquire(
        cls, path: Path, *, shared: bool, timeout_s: float = 0.0, make: bool = True
    ) -> FileLock | None:
        """Lock `path`, by default making it; return None when others still hold it after `timeout_s`.

        A lock file that was removed while we waited is not a lock any more: then try again with
        the file of that name. Raises FileNotFoundError when the directory has gone, or
        without `make` the file.
        """
        deadline_s = time.monotonic() + timeout_s
        mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        flags = os.O_RDWR | _OPEN_FLAGS | (os.O_CREAT if make else 0)
        while True:
            fd = os.open(path, flags, FILE_MODE)
            if _try_flock(fd, mode):
                if _is_same_file(fd, path):
                    return cls(path, fd)
                os.close(fd)
                continue
            os.close(fd)
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(_LOCK_RETRY_S)

    def release(self) -> None:
        """Give the lock back; harmless when already given back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _try_flock(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode)
    except BlockingIOError:
        return False
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
