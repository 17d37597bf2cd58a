"""Hashing what arrives while more arrives: in a thread of its own, block by block, in the order of the box.

xxhash lets other threads run while it hashes, and a block that has just been received is still in the cache.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import xxhash

from snapshot.checksum import checksum
from snapshot.dataplane_parts import Goal

MAX_WAITING_BLOCKS = 64
"""A receiver that is further ahead waits."""


@dataclass(slots=True)
class _Running:
    """The hash of a goal up to `hashed_to`; `waiting` are later blocks, by their start."""

    round: int
    hashed_to: int = 0
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    waiting: dict[int, int] = field(default_factory=dict)


class Hasher:
    """Hashes the blocks of goals; hands the digest of one that is whole to `judge`. Close it."""

    def __init__(self, judge: Callable[[Goal, int, int], None]) -> None:
        self._judge = judge
        self._queue: queue.Queue[tuple[Goal, int, int, int] | None] = queue.Queue(MAX_WAITING_BLOCKS)
        self._running: dict[Goal, _Running] = {}
        self._thread = threading.Thread(target=self._run, name="data-plane-hash", daemon=True)
        self._thread.start()

    def add(self, goal: Goal, round_: int, start: int, stop: int) -> None:
        """Bytes [start, stop) of the goal have arrived."""
        self._queue.put((goal, round_, start, stop))

    def finish(self, goal: Goal, round_: int) -> None:
        """All bytes of the goal have been added."""
        self._queue.put((goal, round_, -1, -1))

    def close(self) -> None:
        """Wait for what was added."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            goal, round_, start, stop = item
            running = self._running.get(goal)
            if running is None or running.round < round_:
                running = self._running[goal] = _Running(round_)
            if running.round > round_:
                continue  # of bytes that no longer count
            if start < 0:
                del self._running[goal]
                whole = running.hashed_to == goal.view.nbytes
                self._judge(goal, round_, running.digest.intdigest() if whole else _checksum(goal))
                continue
            running.waiting[start] = stop
            while (next_stop := running.waiting.pop(running.hashed_to, None)) is not None:
                running.digest.update(cast("bytes", goal.view[running.hashed_to : next_stop]))
                running.hashed_to = next_stop


def _checksum(goal: Goal) -> int:
    return checksum(goal.view)
