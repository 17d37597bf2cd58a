"""Copying and hashing memory with several threads, in blocks that stay in a processor's own cache.

The large copies and hashes leave Python's global lock, so that threads really run side by side. Small work
stays on the calling thread: waking another costs more than it brings.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import xxhash

from reshard.errors import UsageError

BLOCK_BYTES = 512 << 10
MAX_DEFAULT_THREADS = 4
MIN_BYTES_A_THREAD = 2 << 20
"""About a quarter of a millisecond of copying; waking a thread takes a tenth of that."""

_Item = TypeVar("_Item")


def default_num_threads() -> int:
    """Return how many threads copy by default: the processors this process may use, four at most."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_THREADS)


class CopyTeam:
    """A calling thread and up to `num_threads - 1` helpers, which start when first needed.

    Several threads may call at once: they share the helpers. These end when the team is no longer referred
    to. Raises UsageError for fewer than one thread.
    """

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise UsageError(f"num_threads={num_threads}: at least one thread must copy")
        self.num_threads = num_threads
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), thread_name_prefix="snapshot-copy")

    def for_each(self, work: Callable[[_Item], None], items: Iterable[_Item], nbytes: int) -> None:
        """Call `work` for each item once, each thread taking the next in order; return when all are done.

        `nbytes` is how much there is to copy: it decides how many threads take part. Give the largest items
        first. The first error is raised, after every thread has stopped; items not begun by then are left.
        """
        queue = deque(items)
        num_helpers = min(self.num_threads, len(queue), nbytes // MIN_BYTES_A_THREAD) - 1
        if num_helpers < 1:
            _work_off(queue, work)
            return
        started = [self._helpers.submit(_work_off, queue, work) for _ in range(num_helpers)]
        try:
            _work_off(queue, work)
        finally:
            # A helper that was not even scheduled yet finds nothing left to do: not waited for.
            wait([future for future in started if not future.cancel()])
        for future in started:
            if not future.cancelled():
                future.result()


@cache
def shared_team(num_threads: int | None = None) -> CopyTeam:
    """Return the process's team of so many threads (default: `default_num_threads`).

    One for all that copy: each new thread would get a memory pool of its own from malloc, which keeps what
    was freed into it.
    """
    return CopyTeam(default_num_threads() if num_threads is None else num_threads)


def copy_and_hash(target: int, source: int, nbytes: int) -> int:
    """Copy memory between addresses and return the checksum of what was read.

    The source is hashed, so that a copy that went wrong is found like any other damage; block by block and
    right after it was copied, so that it is read from memory once.
    """
    digest = _new_digest()
    for offset in range(0, nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, nbytes - offset)
        _memmove(target + offset, source + offset, size)
        digest.update((ctypes.c_ubyte * size).from_address(source + offset))
    return digest.intdigest()


def _work_off(queue: deque[_Item], work: Callable[[_Item], None]) -> None:
    try:
        while True:
            try:
                item = queue.popleft()
            except IndexError:
                return
            work(item)
    except BaseException:
        queue.clear()
        raise


_memmove = ctypes.memmove
_new_digest = xxhash.xxh3_64
