"""Buddy copies over the real data plane: who keeps what, when it is told, what a lost slice then loses."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_arenas import GENERATION, capture_step, elements, layout_of_hosts, made_arenas

from elastic.agent_buddies import AgentPull, BuddyKeeper
from elastic.protocol import Replicated
from reshard.coverage import uncovered_at
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.redundancy import buddies, captures
from snapshot.arena import Arena
from snapshot.dataplane import DataPlaneServer
from snapshot.manifest import make_static
from snapshot.slot import required_bytes

TOKEN = "job-token"
BOUND_S = 20.0


class Hosts:
    """Agents as far as buddies are concerned: an arena, a server and a keeper each."""

    def __init__(self, layout: Layout, arenas: dict[HostId, Arena], replicas: int) -> None:
        self.layout = layout
        self.arenas = arenas
        self.replicas = replicas
        self.servers: dict[HostId, DataPlaneServer] = {}
        self.keepers: dict[HostId, BuddyKeeper] = {}
        self.told: dict[HostId, queue.SimpleQueue[Any]] = {}
        self.pulls = {host: AgentPull(TOKEN, None) for host in arenas}
        for host in arenas:
            self.serve(host)
        for host, arena in arenas.items():
            self.told[host] = queue.SimpleQueue()
            keeper = BuddyKeeper(arena, host, replicas, self.pulls[host], self.told[host].put)
            keeper.reserve(self.room(host))
            keeper.start()
            self.keepers[host] = keeper

    def room(self, host: HostId) -> int:
        shards = [(copy.path, copy.box) for copy in buddies(self.layout, self.replicas)[host]]
        return required_bytes(make_static(host, self.layout, shards))

    def serve(self, host: HostId) -> None:
        server = DataPlaneServer(self.arenas[host], TOKEN, lambda: GENERATION)
        server.start()
        self.servers[host] = server
        addresses = {host.slice_index: server.address for host, server in self.servers.items()}
        for pull in self.pulls.values():
            pull.addresses = addresses

    def captured(self, step: int, *hosts: HostId) -> None:
        for host in hosts or tuple(self.keepers):
            self.keepers[host].captured(GENERATION, step)

    def wait_replicated(self, step: int, *hosts: HostId) -> None:
        for host in hosts or tuple(self.keepers):
            while self.told[host].get(timeout=BOUND_S) != Replicated(generation=GENERATION, step=step):
                pass

    def gaps_without(self, *lost: HostId, step: int) -> dict[str, Any]:
        """What the other hosts cannot restore of a step."""
        left = [arena for host, arena in self.arenas.items() if host not in lost]
        held = [h for arena in left for _, hs in arena.verified_snapshots().snapshots for h in hs]
        return uncovered_at(self.layout.arrays, held, step=step)

    def close(self) -> None:
        for keeper in self.keepers.values():
            keeper.close()
        for server in self.servers.values():
            server.close()


@contextlib.contextmanager
def running(num_slices: int = 3, replicas: int = 2, step: int = 1) -> Iterator[Hosts]:
    layout = layout_of_hosts(num_slices)
    with made_arenas(layout, replicas, step) as arenas:
        hosts = Hosts(layout, arenas, replicas)
        try:
            yield hosts
        finally:
            hosts.close()


@pytest.mark.parametrize(("num_slices", "replicas"), [(3, 2), (3, 3), (4, 2), (2, 2)])
def test_loss_of_any_slice_leaves_every_box_once_the_copies_are_told(num_slices: int, replicas: int) -> None:
    with running(num_slices, replicas) as hosts:
        hosts.captured(1)
        hosts.wait_replicated(1)
        for host in hosts.arenas:
            assert hosts.gaps_without(host, step=1) == {}
        if replicas == 3:
            assert hosts.gaps_without(HostId(0), HostId(2), step=1) == {}


def test_without_copies_a_lost_slice_leaves_a_gap() -> None:
    with running() as hosts:
        assert list(hosts.gaps_without(HostId(1), step=1)) == ["['w']"]


def test_copies_hold_the_bytes_of_their_step_and_its_place_in_the_stream() -> None:
    with running() as hosts:
        hosts.captured(1)
        hosts.wait_replicated(1)
        host = HostId(0)
        (copy,) = buddies(hosts.layout, 2)[host]
        source = hosts.arenas[host].find_shards(1, GENERATION)
        start, stop = copy.box[0]
        found = source.read(copy.path, copy.box).tobytes()
        assert found == elements(copy.path, 1)[start:stop].tobytes()
        assert source.position == 8
        source.close()


def test_host_that_captures_later_is_waited_for() -> None:
    with running() as hosts:
        late = HostId(1)
        others = tuple(host for host in hosts.arenas if host != late)
        for host in others:
            capture_step(hosts.arenas[host], hosts.layout, 2, 2)
        hosts.captured(2, *others)
        waits = next(h for h in others if late in buddies(hosts.layout, 2)[h][0].sources)
        with pytest.raises(queue.Empty):
            hosts.told[waits].get(timeout=0.3)
        capture_step(hosts.arenas[late], hosts.layout, 2, 2)
        hosts.captured(2, late)
        hosts.wait_replicated(2)


def test_owner_whose_agent_was_away_is_asked_again() -> None:
    with running() as hosts:
        owner = HostId(2)
        hosts.servers.pop(owner).close()
        hosts.captured(1)
        hosts.serve(owner)
        hosts.wait_replicated(1)


def test_copies_of_the_step_before_stay_until_the_next_are_complete() -> None:
    with running() as hosts:
        hosts.captured(1)
        hosts.wait_replicated(1)
        owner = HostId(1)
        hosts.servers.pop(owner).close()
        for arena in hosts.arenas.values():
            capture_step(arena, hosts.layout, 2, 2)
        hosts.captured(2)
        kept = buddies(hosts.layout, 2)
        waiting = [host for host in kept if owner in kept[host][0].sources]
        hosts.wait_replicated(2, *(host for host in kept if host not in waiting))
        assert hosts.gaps_without(owner, step=1) == {}
        hosts.serve(owner)
        hosts.wait_replicated(2, *waiting)
        for host in hosts.arenas:
            assert hosts.gaps_without(host, step=2) == {}


def test_error_that_should_not_be_does_not_end_the_attempts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("elastic.agent_buddies.UNEXPECTED_RETRY_S", 0.01)
    layout = layout_of_hosts(2)
    errors = [TypeError("should not be"), None]

    def pull(generation: int, step: int, copies: Any, views: Any, given_up: Any) -> list[int]:
        if (error := errors.pop(0)) is not None:
            raise error
        return [0] * len(copies)

    with made_arenas(layout, 2, 1) as arenas:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        keeper = BuddyKeeper(arenas[HostId(0)], HostId(0), 2, pull, told.put)
        keeper.reserve(1 << 16)
        keeper.start()
        keeper.captured(GENERATION, 1)
        assert told.get(timeout=BOUND_S) == Replicated(generation=GENERATION, step=1)
        keeper.close()
    assert "should not be" in capsys.readouterr().err


def test_world_given_up_ends_what_is_pulled_for_it() -> None:
    with running() as hosts:
        for server in hosts.servers.values():
            server.close()
        hosts.captured(1)
        for keeper in hosts.keepers.values():
            keeper.leave()
            keeper.reserve(1)  # has to wait for a pull under way: at once, not until that times out
        assert all(told.empty() for told in hosts.told.values())


def test_pull_goes_on_at_once_where_another_agent_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.agent_buddies.PULL_DEADLINE_S", 10 * BOUND_S)  # not waited for
    with running() as hosts:
        for server in hosts.servers.values():
            server.close()
        hosts.captured(1)
        for pull in hosts.pulls.values():
            while pull._under_way is None:  # until each asks where nobody serves any more
                threading.Event().wait(0.001)
        for host in hosts.arenas:
            hosts.serve(host)
        hosts.wait_replicated(1)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_place_for_copies_is_made_anew_where_it_is_gone(damage: Callable[[Path], None]) -> None:
    with running() as hosts:
        hosts.captured(1)
        hosts.wait_replicated(1)
        for arena in hosts.arenas.values():
            for path in arena.directory.glob("buddy*"):
                damage(path)
            capture_step(arena, hosts.layout, 2, 2)
        hosts.captured(2)
        hosts.wait_replicated(2)
        for host in hosts.arenas:
            assert hosts.gaps_without(host, step=2) == {}


def test_agent_that_takes_over_pulls_what_was_captured_last() -> None:
    with running() as hosts:
        for keeper in hosts.keepers.values():
            keeper.captured_before(GENERATION)
        hosts.wait_replicated(1)


def test_host_that_keeps_nothing_tells_at_once() -> None:
    layout = layout_of_hosts(3)
    with made_arenas(layout, 1, 1) as arenas:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        keeper = BuddyKeeper(arenas[HostId(0)], HostId(0), 1, AgentPull(TOKEN, None), told.put)
        assert captures(layout, 1)[HostId(0)]
        assert keeper.pull_newest(GENERATION, 1)
        assert told.get_nowait() == Replicated(generation=GENERATION, step=1)
        assert keeper.pull_newest(GENERATION, 9)  # overwritten, or never captured: nothing to tell
        assert told.empty()
        keeper.close()
