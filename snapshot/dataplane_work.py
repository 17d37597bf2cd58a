"""What is left to fetch, shared by one thread for each source.

Large boxes are cut into parts where several sources have them. A source takes a batch, the largest parts
first, its share of what is left; so near the end batches get small. One that has nothing left to take looks
at what a slow or stalled one still holds, and has that connection cut: the slow source's own thread then
gives its parts back, and never writes into them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from reshard.boxes import format_box
from reshard.errors import CorruptCopyError, ElasticError
from snapshot.checksum import checksum
from snapshot.dataplane_parts import Goal, Held, Part

PART_BYTES = 32 << 20
BATCH_BYTES = 8 << 20
"""A source takes at least this much at once, so that requests stay few."""
MAX_BATCH_PARTS = 1024
SLOW_S = 0.25
"""How old a batch must be before another source may take it over."""
WAIT_S = 0.05
"""How often an idle source looks at what the others hold."""


class Work:
    """The queue, for use by the threads of all sources. `over` is set when all is done or nothing can be."""

    def __init__(self, goals: Sequence[Goal], sources: Sequence[str]) -> None:
        self.over = threading.Event()
        self.error: ElasticError | None = None
        self.bytes_from = dict.fromkeys(sources, 0)
        self.num_taken_over = 0
        self._sources = set(sources)
        self._goals = goals
        self._num_left = 0
        self._queue: list[Part] = []
        self._held: dict[str, Held] = {}
        self._changed = threading.Condition()
        for goal in goals:
            if goal.view.nbytes == 0:
                goal.is_done, goal.digest = True, checksum(b"")
                continue
            self._num_left += 1
            self._enqueue(goal)
        self._sort()
        if not self._num_left:
            self.over.set()

    # ---- taking ----

    def take(self, source: str, cut: Callable[[], None]) -> list[Part]:
        """Return parts to fetch from `source`, waiting for some; none when there never will be any."""
        with self._changed:
            while not self.over.is_set() and source in self._sources:
                batch = self._pick(source)
                if batch:
                    self._held[source] = Held(list(batch), time.monotonic(), cut)
                    return batch
                if not any(source in goal.live and not goal.is_done for goal in self._goals):
                    break
                self._cut_slowest(source)
                self._changed.wait(WAIT_S)
        return []

    def arrived(self, source: str, nbytes: int) -> None:
        """Note bytes that came from a source; called by its thread alone."""
        self.bytes_from[source] += nbytes
        self._held[source].got_bytes += nbytes

    def _pick(self, source: str) -> list[Part]:
        left_bytes = sum(part.left_bytes for part in self._queue)
        num_sources = len(self._sources)
        fair_bytes = max(BATCH_BYTES, left_bytes // (2 * num_sources))
        share_bytes = fair_bytes if num_sources > 1 else max(1, left_bytes)
        batch: list[Part] = []
        rest: list[Part] = []
        for part in self._queue:
            is_mine = source in part.goal.live and source not in part.avoid
            if is_mine and share_bytes > 0 and len(batch) < MAX_BATCH_PARTS:
                share_bytes -= part.left_bytes
                batch.append(part)
            else:
                rest.append(part)
        for part in batch:
            part.goal.num_held += 1
            if part.goal.verify and part.done_bytes and part.source != source:
                part.goal.round += 1  # all of it from one source, so that it is known who was wrong
                part.round, part.done_bytes = part.goal.round, 0
            part.source = source
        self._queue = rest
        return batch

    def _cut_slowest(self, source: str) -> None:
        """Cut the connection of a source that would need long for what this one could fetch sooner."""
        now_s = time.monotonic()
        for other, held in self._held.items():
            age_s = now_s - held.since_s
            left_bytes = sum(part.left_bytes for part in held.parts)
            mine = any(self._could_take_over(source, part, held) for part in held.parts)
            if other == source or held.was_cut or age_s < SLOW_S or not mine:
                continue
            remaining_s = left_bytes * age_s / held.got_bytes if held.got_bytes else float("inf")
            if remaining_s > age_s:
                held.was_cut = True
                self.num_taken_over += 1
                held.cut()
                return

    @staticmethod
    def _could_take_over(source: str, part: Part, held: Held) -> bool:
        # What has to come from one source would begin anew: only from one that sends nothing at all.
        is_worth_it = not part.goal.verify or not held.got_bytes
        return is_worth_it and source in part.goal.live and source not in part.avoid

    # ---- giving back ----

    def finish(self, part: Part, expected: int | None) -> bool:
        """Note that all bytes of a part are there; `expected` is the checksum of the whole box, if one came.

        Return whether the goal has all its bytes: then `judge` it.
        """
        with self._changed:
            goal = part.goal
            if not self._let_go(part):
                return False
            goal.num_open -= 1
            if expected is not None:
                goal.expected[part.source] = expected
            return goal.num_open == 0

    def give_back(self, source: str) -> None:
        """Put what a source still holds back into the queue: its connection is broken."""
        with self._changed:
            held = self._held.pop(source, None)
            for part in list(held.parts) if held else []:
                part.goal.num_held -= 1
                if held is not None and held.was_cut and set(part.goal.live) - {source} - part.avoid:
                    part.avoid.add(source)
                else:
                    part.avoid.clear()
                self._put_back(part)
            self._sort()
            self._changed.notify_all()

    def release(self, source: str) -> None:
        """Note that a source is through with its batch."""
        with self._changed:
            self._held.pop(source, None)
            self._changed.notify_all()

    def put_back(self, part: Part) -> None:
        """Put one part back, to be taken again later."""
        with self._changed:
            if self._let_go(part):
                self._put_back(part)
                self._changed.notify_all()

    def refuse(self, part: Part, error: ElasticError, *, spoilt: bool = False) -> None:
        """Note that a part's source cannot give it; `spoilt` when bytes of it that are there are not good."""
        with self._changed:
            current = self._let_go(part)
            self._drop_source(part.goal, part.source, error)
            if current and spoilt:
                self._restart(part.goal)
            elif current:
                self._put_back(part)
            self._changed.notify_all()

    def lose_source(self, source: str, error: ElasticError) -> None:
        """Note that a source will not serve us."""
        with self._changed:
            self._sources.discard(source)
            for goal in self._goals:
                if not goal.is_done and source in goal.live:
                    self._drop_source(goal, source, error)
            self._changed.notify_all()

    def mismatch(self, part: Part) -> None:
        """Note that a part's own checksum did not match."""
        with self._changed:
            if self._let_go(part):
                self._distrust(part.goal, part.source)
                self._changed.notify_all()

    def judge(self, goal: Goal, round_: int, digest: int) -> None:
        """Compare the digest of a goal that has all its bytes with what its sources said."""
        with self._changed:
            if goal.round != round_ or goal.is_done:
                return
            if all(expected == digest for expected in goal.expected.values()):
                goal.is_done, goal.digest = True, digest
                self._num_left -= 1
                if not self._num_left:
                    self.over.set()
            else:
                self._distrust(goal, next(iter(goal.expected)))
            self._changed.notify_all()

    def fail(self, error: ElasticError) -> None:
        """End it all with an error, unless it has ended."""
        with self._changed:
            if not self.over.is_set():
                self.error = error
                self.over.set()
            self._changed.notify_all()

    # ---- under the lock ----

    def _let_go(self, part: Part) -> bool:
        """Take a part out of its source's hands; return whether it still counts."""
        held = self._held.get(part.source)
        if held is not None and part in held.parts:
            held.parts.remove(part)
        goal = part.goal
        goal.num_held -= 1
        if part.round == goal.round:
            return True
        self._enqueue_again(goal)
        return False

    def _put_back(self, part: Part) -> None:
        if part.round == part.goal.round:
            if part.avoid.issuperset(part.goal.live):
                part.avoid.clear()
            self._queue.append(part)
        else:
            self._enqueue_again(part.goal)

    def _drop_source(self, goal: Goal, source: str, error: ElasticError) -> None:
        if source in goal.live:
            goal.live.remove(source)
            goal.errors.append(error)
            for part in self._queue:
                if part.goal is goal:
                    part.avoid.clear()  # better slowly than not at all
        if not goal.live and self.error is None and not self.over.is_set():
            corrupt = [each for each in goal.errors if isinstance(each, CorruptCopyError)]
            self.error = (corrupt or goal.errors)[0]
            self.over.set()

    def _distrust(self, goal: Goal, source: str) -> None:
        """Fetch a goal again: first with the sources verifying, then without the one that was wrong even
        so.
        """
        if goal.verify:
            what = f"{goal.path} {format_box(goal.box)} was damaged on its way from {source}"
            self._drop_source(goal, source, CorruptCopyError(what, path=goal.path, box=goal.box))
        goal.verify = True
        self._restart(goal)

    def _restart(self, goal: Goal) -> None:
        goal.round += 1
        goal.expected.clear()
        self._queue = [part for part in self._queue if part.goal is not goal]
        goal.num_open = 0
        self._enqueue_again(goal)

    def _enqueue_again(self, goal: Goal) -> None:
        if goal.num_held == 0 and goal.num_open == 0 and not goal.is_done:
            self._enqueue(goal)
            self._sort()

    def _enqueue(self, goal: Goal) -> None:
        nbytes = goal.view.nbytes
        size = PART_BYTES if len(goal.live) > 1 and not goal.verify else nbytes
        for start in range(0, nbytes, size):
            self._queue.append(Part(goal, start, min(start + size, nbytes), goal.round))
            goal.num_open += 1

    def _sort(self) -> None:
        self._queue.sort(key=lambda part: -part.left_bytes)
