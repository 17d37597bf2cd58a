"""What an agent has said that a coordinator may not have heard: it is told again after a break of the stream,
or to the coordinator that takes over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from elastic.events import (
    DigestDone,
    Fenced,
    Finished,
    LaidOut,
    LeftWorld,
    Persisted,
    PersistSettled,
    PreemptionNotice,
    Rebuilt,
    SharePersisted,
    Staged,
    StepFailed,
    WorkerFailed,
)
from elastic.protocol import CommitsKept, StepTold

MAX_COMMITS = 4096
"""Commits kept until a coordinator has them in the history; of those a slice makes in a minute."""
_OF_A_WORLD = (Fenced, Staged, LaidOut, Rebuilt, StepFailed, LeftWorld, Finished, DigestDone, SharePersisted)
_OF_THE_WORKER = (WorkerFailed, PreemptionNotice)


class Said:
    """The last word of each kind, and all commits that are not in the history yet."""

    def __init__(self) -> None:
        self._words: dict[object, Any] = {}
        self._commits: deque[StepTold] = deque(maxlen=MAX_COMMITS)
        self.newest_commit = (-1, -1)
        """Generation and step of the newest commit that was told."""

    def note(self, event: Any) -> None:
        """An event is being told."""
        if isinstance(event, StepTold):
            self._commits.append(event)
            self.newest_commit = max(self.newest_commit, _place(event))
        elif isinstance(event, DigestDone):
            self._words[DigestDone, event.purpose] = event
        elif isinstance(event, (*_OF_A_WORLD, *_OF_THE_WORKER, Persisted)):
            self._words[type(event)] = event

    def again(self, generation: int) -> Iterator[Any]:
        """What to tell after attaching, in order: commits, and what still counts in this generation."""
        yield from tuple(self._commits)
        for event in tuple(self._words.values()):
            if not isinstance(event, _OF_A_WORLD) or event.generation == generation:
                yield event

    def kept(self, word: CommitsKept) -> None:
        """Commits up to here are in the history (or are of a world whose commits count no more)."""
        newest = (word.generation, word.step)
        while self._commits and _place(self._commits[0]) <= newest:
            self._commits.popleft()

    def settled(self, word: PersistSettled) -> None:
        """What became of this step's snapshot is known."""
        for kind in (SharePersisted, Persisted):
            event = self._words.get(kind)
            if event is not None and (event.generation, event.step) <= (word.generation, word.step):
                del self._words[kind]

    def forget(self) -> None:
        """A world is over: what was said in it counts no more, but for what is of the worker or on disk."""
        kept = (*_OF_THE_WORKER, Persisted)
        self._words = {key: event for key, event in self._words.items() if isinstance(event, kept)}

    def forget_worker(self) -> None:
        """Another worker is started."""
        self._words = {
            key: event for key, event in self._words.items() if not isinstance(event, _OF_THE_WORKER)
        }


def _place(told: StepTold) -> tuple[int, int]:
    return told.record.generation, told.record.step
