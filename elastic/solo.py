"""The link of a world that a process plays alone (see `elastic.solo_worlds`): nobody hears of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from elastic.events import WorldSpec
from elastic.ports import Link, Room
from elastic.protocol import WorkerCommitted
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.arena import Arena
from snapshot.persist_tree import TreeDescription


class SoloLink:
    """The link of a world that is played alone: nobody hears of it. `link` is that of the process, which may
    have something better to do by now. See `elastic.ports.Link`.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._is_over = False
        self.error = ""
        """Why it did not come to its end."""

    def wait_world(self) -> WorldSpec | None:
        """Not for this link."""
        raise NotImplementedError

    def is_fenced(self, generation: int) -> bool:
        """Whether it is over, or has to be."""
        return self._is_over or self._link.is_fenced(generation)

    def stop_step(self, generation: int) -> int | None:
        """It has one step only."""
        return None

    def audit_step(self, generation: int) -> int | None:
        """Nothing is captured."""
        return None

    def wait_fenced(self, generation: int, timeout_s: float | None) -> bool:
        """It waits for nobody."""
        return True

    def arenas(self) -> Mapping[HostId, Arena]:
        """Nothing is captured."""
        return {}

    def reserve(self, host: HostId, room: Room) -> None:
        """Nothing is captured."""

    def replicated_step(self, generation: int) -> int | None:
        """Nothing is replicated."""
        return None

    def rebuilt(
        self, generation: int, restored_step: int | None, form_s: float, restore_s: float, shm_bytes: int
    ) -> None:
        """Nobody waits for it."""

    def laid_out(self, generation: int, layout: Layout, lacking: str = "") -> None:
        """The worlds that train tell it."""

    def described(self, tree: TreeDescription) -> None:
        """The worlds that train tell it."""

    def captured(self, host: HostId, generation: int, step: int, checksums: bytes, *, is_audit: bool) -> None:
        """Nothing is captured."""

    def committed(self, message: WorkerCommitted) -> None:
        """Nothing is committed."""

    def left(self, generation: int) -> None:
        """The one step is done."""
        self._is_over = True

    def ended(self, generation: int, step: int) -> None:
        """The loop ends where it trains."""
        self._is_over = True

    def step_failed(self, generation: int, error: str, devices: str | None = None) -> None:
        """Whatever it was: where it trains it will be told."""
        self._fail(error)

    def user_failed(self, error: str, exit_status: int) -> None:
        """Whatever it was: where it trains it will be told."""
        self._fail(error)

    def rehearsed(self, generation: int, error: str) -> None:
        """Not for this link."""
        raise NotImplementedError

    def unwound(self, generation: int) -> None:
        """Out of it: the process goes on to what it is for."""
        self._is_over = True
        self._link.rehearsed(generation, self.error)

    def _fail(self, error: str) -> None:
        if not self.error:
            self.error = error
            print(f"elastic: a rehearsal was given up: {error}", file=sys.stderr, flush=True)
