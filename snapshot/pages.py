"""Pages of mapped files: made present without holding up other threads, and huge where the mount allows.

For a tmpfs mount its own option `huge=` decides (https://docs.kernel.org/admin-guide/mm/transhuge.html):
`always` and `within_size` give huge pages without being asked, `advise` on request, `never` (the default)
not at all. Nothing here needs them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Any

_MADV_POPULATE_WRITE = 23  # Linux 5.14; missing from Python's mmap


def huge_page_setting(fd: int) -> str:
    """Return the `huge=` option of the mount that holds an open file; "never" where there is none."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for line in lines:
            mount, _, system = line.partition(" - ")
            if mount.split()[2] == wanted:
                options = system.split()[-1].split(",")
                found = [option.removeprefix("huge=") for option in options if option.startswith("huge=")]
                return found[0] if found else "never"
    return "never"


def fill_with_huge_pages(fd: int, nbytes: int) -> None:
    """Give a new, empty file `nbytes` of huge pages, as far as there are any.

    Must come before anything else makes pages: those are small ones. Fails silently, in whole or in part;
    so `posix_fallocate` afterwards makes the rest, or says that there is no room.
    """
    os.ftruncate(fd, nbytes)
    with contextlib.suppress(OSError), mmap.mmap(fd, nbytes, mmap.MAP_SHARED) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        _populate(mapping)


def fault_in(mapping: mmap.mmap) -> None:
    """Make all pages of a writable mapping present, while other Python threads run.

    Raises OSError where a page does not exist and cannot be made, where touching it would end the process
    with SIGBUS.
    """
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        _populate(mapping)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14: then pages come as they are written
            raise


def _populate(mapping: mmap.mmap) -> None:
    first = ctypes.c_char.from_buffer(mapping)
    try:
        failed = _libc().madvise(ctypes.byref(first), ctypes.c_size_t(len(mapping)), _MADV_POPULATE_WRITE)
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        del first  # else the mapping cannot be closed


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
