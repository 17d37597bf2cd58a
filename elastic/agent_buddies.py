"""Buddy copies: what too few slices hold, the agents of other slices pull into their own memory.

Every agent works out from the layout alone what it keeps for whom. It pulls after each capture of its own
worker, off the training path, and tells the worker when the copies are there: only then may the snapshot
before be overwritten. A pull that fails is tried again as long as the world lives.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.members import member_of
from elastic.protocol import Replicated
from reshard.errors import ElasticError
from reshard.ids import HostId
from reshard.redundancy import BuddyCopy, host_buddies, needs_buddies
from snapshot.arena import Arena
from snapshot.buddy_slots import BuddySlots
from snapshot.dataplane import TlsFiles, Wanted, fetch
from snapshot.manifest import Manifest, StaticManifest, make_static

PULL_DEADLINE_S = 10.0
RETRY_S = 0.1
UNEXPECTED_RETRY_S = 2.0
"""After an error that should not be, which goes to the agent's log."""

Pull = Callable[[int, int, Sequence[BuddyCopy], Sequence[memoryview], threading.Event], Sequence[int]]
"""Fills the views with the copies of (generation, step) and returns their checksums.

Raises ElasticError or OSError when it cannot (yet), also soon after the event is set.
"""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What this host keeps for others in one world."""

    generation: int
    static: StaticManifest
    copies: tuple[BuddyCopy, ...]


class AgentPull:
    """Pulls over the data plane from the agents whose addresses it was last told.

    A pull from an agent that has moved meanwhile (another one has taken over) is given up: it would go on
    asking at the old address until its deadline, and captures wait for copies.
    """

    def __init__(self, token: str, tls: TlsFiles | None, hosts_per_slice: int = 1) -> None:
        self._token = token
        self._tls = tls
        self._hosts_per_slice = hosts_per_slice
        self._addresses: Mapping[int, str] = {}
        self._under_way: tuple[frozenset[int], threading.Event] | None = None

    @property
    def addresses(self) -> Mapping[int, str]:
        """Where the agents serve, by member."""
        return self._addresses

    @addresses.setter
    def addresses(self, addresses: Mapping[int, str]) -> None:
        before, self._addresses = self._addresses, addresses
        if (pull := self._under_way) is not None:
            sources, given_up = pull
            if any(addresses.get(index) != before.get(index) for index in sources):
                given_up.set()

    def __call__(
        self,
        generation: int,
        step: int,
        copies: Sequence[BuddyCopy],
        views: Sequence[memoryview],
        given_up: threading.Event,
    ) -> Sequence[int]:
        """See `Pull`."""
        sources = frozenset(self._members(host for copy in copies for host in copy.sources))
        self._under_way = sources, given_up  # before the addresses are read
        try:
            return self._fetch(generation, step, copies, views, given_up)
        finally:
            self._under_way = None

    def _members(self, hosts: Iterable[HostId]) -> Iterator[int]:
        return (member_of(host, self._hosts_per_slice) for host in hosts)

    def _fetch(
        self,
        generation: int,
        step: int,
        copies: Sequence[BuddyCopy],
        views: Sequence[memoryview],
        given_up: threading.Event,
    ) -> Sequence[int]:
        known = self._addresses
        wanted = [
            Wanted(
                path=copy.path,
                box=copy.box,
                sources=tuple(known[member] for member in self._members(copy.sources) if known.get(member)),
                into=view,
            )
            for copy, view in zip(copies, views, strict=True)
        ]
        return fetch(
            wanted,
            token=self._token,
            generation=generation,
            step=step,
            of_generation=generation,
            deadline_s=PULL_DEADLINE_S,
            tls=self._tls,
            await_capture=True,
            given_up=given_up,
        ).checksums


class BuddyKeeper:
    """Keeps this host's copies of other slices' boxes; `tell` gets Replicated.

    `pull_newest` does the work at once; `start` has a thread do it after each `captured`.
    """

    def __init__(
        self, arena: Arena, host: HostId, replicas: int, pull: Pull, tell: Callable[[Any], None]
    ) -> None:
        self._arena = arena
        self._host = host
        self._replicas = replicas
        self._pull = pull
        self._tell = tell
        self._slots = BuddySlots(arena.directory)
        self._slots_lock = threading.Lock()
        self._changed = threading.Condition()
        self._newest: tuple[int, int] | None = None
        self._given_up = threading.Event()
        self._closed = False
        self._kept: _Kept | None = None
        self._idle_generation = -1
        """A world in which no host keeps anything for others."""

    def start(self) -> None:
        """Have a thread pull whatever is captured from now on."""
        threading.Thread(target=self._run, name="buddies", daemon=True).start()

    def reserve(self, slot_bytes: int) -> None:
        """Make room for what this host keeps. Raises InsufficientMemoryError."""
        self.leave()
        with self._slots_lock:
            self._slots.reserve(slot_bytes)

    def captured(self, generation: int, step: int) -> None:
        """The worker of this host has captured a step: pull the copies of it that belong here."""
        if generation == self._idle_generation:
            return
        with self._changed:
            self._newest = generation, step
            self._changed.notify_all()

    def captured_before(self, generation: int) -> None:
        """An agent has taken over: what the worker captured last in this world counts as captured now."""
        steps = [m.step for m in self._arena.captured().complete if m.generation == generation]
        if steps:
            self.captured(generation, max(steps))

    def leave(self) -> None:
        """The world is given up: nothing more is pulled for it."""
        with self._changed:
            self._given_up.set()
            self._newest = None
            self._changed.notify_all()

    def close(self) -> None:
        """Stop; the files stay."""
        self.leave()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._slots_lock:
            self._slots.close()

    def _run(self) -> None:
        while (newest := self._next()) is not None:
            if self.pull_newest(*newest):
                with self._changed:
                    if self._newest == newest:
                        self._newest = None
            else:
                self._given_up.wait(RETRY_S)

    def _next(self) -> tuple[int, int] | None:
        """Wait for a capture whose copies are wanted here; None when this keeper is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._newest is not None)
            if self._closed:
                return None
            self._given_up.clear()  # of the world before, or of a pull from where nobody serves any more
            return self._newest

    def pull_newest(self, generation: int, step: int) -> bool:
        """Pull the copies of one step; False when that has to be tried again."""
        manifest = self._own(generation, step)
        if manifest is None:
            return True  # overwritten meanwhile: a later one comes
        kept = self._kept_in(manifest)
        with self._slots_lock:
            if self._closed:
                return True
            if kept.copies and not self._slots.holds(generation, step):
                try:
                    self._fill(kept, manifest)
                except (ElasticError, OSError):
                    return False
                except Exception:  # captures wait for these copies: nothing may end the attempts
                    traceback.print_exc()
                    self._given_up.wait(UNEXPECTED_RETRY_S)
                    return False
        self._tell(Replicated(generation=generation, step=step))
        return True

    def _fill(self, kept: _Kept, manifest: Manifest) -> None:
        writer = self._slots.begin(kept.static, manifest.step)
        views = writer.shard_views
        checksums = self._pull(manifest.generation, manifest.step, kept.copies, views, self._given_up)
        writer.commit(
            step=manifest.step,
            generation=manifest.generation,
            position=manifest.position,
            checksums=checksums,
        )

    def _own(self, generation: int, step: int) -> Manifest | None:
        for manifest in self._arena.captured().complete:
            if (manifest.generation, manifest.step) == (generation, step):
                return manifest
        return None

    def _kept_in(self, manifest: Manifest) -> _Kept:
        if self._kept is None or self._kept.generation != manifest.generation:
            layout = manifest.static.layout
            if not needs_buddies(layout, self._replicas):
                self._idle_generation = manifest.generation
            copies = host_buddies(layout, self._host, self._replicas)
            static = make_static(self._host, layout, [(copy.path, copy.box) for copy in copies])
            self._kept = _Kept(manifest.generation, static, copies)
        return self._kept
