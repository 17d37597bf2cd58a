"""A worker's link to its agent: worlds and fences come in, and a new agent is told again what matters."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from elastic import agent_link
from elastic.agent_link import AgentLink
from elastic.events import AuditAfter, Captured, Fence, LaidOut, LeftWorld, StopAfter, WorldSpec
from elastic.job import ENV_STANDBY, ROLE_SHADOW, ROLE_WARM, JobSpec
from elastic.ports import JobOver, Room
from elastic.protocol import (
    EnterWorld,
    Heartbeat,
    Hello,
    JobEnded,
    LoopEnded,
    Rehearse,
    Rehearsed,
    Reserve,
    Reserved,
    TakeTurn,
    Unwound,
    WorkerCommitted,
)
from elastic.state import Config
from elastic.wire import FramedSocket
from elastic.worker_socket import WorkerSocket
from reshard.errors import InsufficientMemoryError, UsageError
from reshard.ids import HostId
from reshard.layout import Layout, MeshLayout

BOUND_S = 10.0
WORLD = WorldSpec(
    generation=2, rank=0, slices=(0, 1), service_address="", restore_step=None, newest_committed=-1,
    rehearsal=False, replicas=2,
)  # fmt: skip
COMMITTED = WorkerCommitted(
    generation=2, step=0, loss=1.0, step_s=0.1, stall_s=0.0, captured_bytes=1, compile_s=0.0,
    cache_hits=0, cache_misses=0,
)  # fmt: skip


class FakeAgent:
    """The agent's end of the socket: what it heard, and a way to speak."""

    def __init__(self, spec: JobSpec) -> None:
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.connection: FramedSocket | None = None
        self._socket = WorkerSocket(spec.socket_path(0), self._hear)

    def _hear(self, item: tuple[FramedSocket, Any]) -> None:
        self.connection, message = item
        if not isinstance(message, Heartbeat):
            self._heard.put(message)

    def next(self) -> Any:
        return self._heard.get(timeout=BOUND_S)

    def say(self, message: Any) -> None:
        assert self.connection is not None
        self.connection.send(message)

    def die(self) -> None:
        assert self.connection is not None
        self._socket.close()
        self.connection.close()


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "elastic-test" / "s0h0").mkdir(parents=True)
    return JobSpec(
        job_id="test", directory=tmp_path, adapter="multicontroller", in_place="proven",
        simulated_faults=False, command=("true",), service_command=(), config=Config(num_slices=2),
        shm_root=tmp_path,
    )  # fmt: skip


@pytest.fixture
def agent(spec: JobSpec) -> FakeAgent:
    return FakeAgent(spec)


@pytest.fixture
def unblocked() -> threading.Event:
    return threading.Event()


@pytest.fixture
def link(spec: JobSpec, agent: FakeAgent, unblocked: threading.Event) -> Iterator[AgentLink]:
    made = AgentLink(spec, 0, unblocked.set)
    assert agent.next() == Hello(pid=os.getpid(), generation=0)
    yield made
    agent.say(JobEnded(completed=True))


def in_world(link: AgentLink, agent: FakeAgent) -> None:
    agent.say(EnterWorld(world=WORLD))
    assert link.wait_world() == WORLD


def test_fence_unblocks_the_main_thread_until_it_is_out(
    link: AgentLink, agent: FakeAgent, unblocked: threading.Event
) -> None:
    in_world(link, agent)
    assert not link.is_fenced(WORLD.generation)
    agent.say(Fence(member=0, generation=3))
    assert link.wait_fenced(WORLD.generation, BOUND_S)
    assert unblocked.wait(BOUND_S)
    unblocked.clear()
    assert unblocked.wait(BOUND_S)  # again: the thread may only now have entered the collective
    link.unwound(WORLD.generation)
    assert agent.next() == Unwound(generation=3)
    unblocked.clear()
    assert "unblock" not in {thread.name for thread in threading.enumerate()}


def test_fence_outside_a_world_is_acknowledged_at_once(link: AgentLink, agent: FakeAgent) -> None:
    agent.say(Fence(member=0, generation=5))
    assert agent.next() == Unwound(generation=5)


def test_fence_takes_back_a_world_that_was_not_entered_yet(link: AgentLink, agent: FakeAgent) -> None:
    agent.say(EnterWorld(world=WORLD))
    agent.say(Fence(member=0, generation=3))
    assert agent.next() == Unwound(generation=3)
    agent.say(JobEnded(completed=True))
    assert link.wait_world() is None


def test_kept_runtime_is_let_go_by_a_fence_that_keeps_none_while_a_world_is_waited_for(
    link: AgentLink, agent: FakeAgent
) -> None:
    released = threading.Event()
    link.release = released.set
    agent.say(Fence(member=0, generation=3, keep_runtime=True))
    assert agent.next() == Unwound(generation=3)
    assert link.keeps_runtime()
    waiting = threading.Thread(target=link.wait_world, daemon=True)
    waiting.start()
    agent.say(Fence(member=0, generation=4))
    assert released.wait(BOUND_S)
    assert not link.keeps_runtime()
    agent.say(EnterWorld(world=WORLD))
    waiting.join(BOUND_S)
    assert not waiting.is_alive()


def test_boundary_holds_for_its_own_generation_only(link: AgentLink, agent: FakeAgent) -> None:
    in_world(link, agent)
    agent.say(StopAfter(member=0, generation=2, step=7))
    agent.say(Fence(member=0, generation=2))
    assert link.wait_fenced(1, BOUND_S)
    assert (link.stop_step(2), link.stop_step(3)) == (7, None)


def test_next_agent_is_told_again_what_the_last_may_not_have_heard(
    link: AgentLink, agent: FakeAgent, spec: JobSpec
) -> None:
    in_world(link, agent)
    link.committed(COMMITTED)
    assert agent.next() == COMMITTED
    agent.die()
    link.ended(2, 0)  # nobody hears this
    successor = FakeAgent(spec)
    told = [successor.next() for _ in range(3)]
    assert told[0] == Hello(pid=os.getpid(), generation=2)
    assert COMMITTED in told
    assert LoopEnded(generation=2, step=0) in told
    successor.say(JobEnded(completed=True))
    agent.connection = successor.connection


def test_commits_made_while_no_agent_is_there_are_told_to_the_next(
    spec: JobSpec, link: AgentLink, agent: FakeAgent
) -> None:
    in_world(link, agent)
    link.rebuilt(WORLD.generation, 3, 0.1, 0.2, 1024)
    rebuilt = agent.next()
    agent.die()
    made = [replace(COMMITTED, step=step) for step in range(40)]
    for message in made:
        link.committed(message)
    successor = FakeAgent(spec)
    assert successor.next() == Hello(pid=os.getpid(), generation=2)
    assert [successor.next() for _ in (*made, rebuilt)] == [*made, rebuilt]
    successor.say(JobEnded(completed=True))
    agent.connection = successor.connection


def test_too_little_memory_is_told_with_both_sizes(link: AgentLink, agent: FakeAgent) -> None:
    def answer() -> None:
        assert isinstance(agent.next(), Reserve)
        agent.say(Reserved(error="full", needed_bytes=10, available_bytes=3))

    answering = threading.Thread(target=answer)
    answering.start()
    with pytest.raises(InsufficientMemoryError) as error:
        link.reserve(HostId(0), Room(slot_bytes=10, journal_record_bytes=1, journal_records=1))
    answering.join()
    assert (error.value.needed_bytes, error.value.available_bytes) == (10, 3)


def test_arena_that_cannot_be_used_is_told_with_the_reason(link: AgentLink, agent: FakeAgent) -> None:
    def answer() -> None:
        assert isinstance(agent.next(), Reserve)
        agent.say(Reserved(error="slot s0h0/slot1 cannot be used"))

    answering = threading.Thread(target=answer)
    answering.start()
    with pytest.raises(UsageError, match="slot s0h0/slot1 cannot be used"):
        link.reserve(HostId(0), Room(slot_bytes=10, journal_record_bytes=1, journal_records=1))
    answering.join()


def test_stopped_job_ends_every_wait(link: AgentLink, agent: FakeAgent) -> None:
    in_world(link, agent)
    agent.say(JobEnded(completed=False))
    with pytest.raises(JobOver):
        link.wait_fenced(WORLD.generation, BOUND_S)
    with pytest.raises(JobOver):
        link.wait_world()
    assert link.is_fenced(WORLD.generation)
    link.unwound(WORLD.generation)


LAYOUT = Layout(
    mesh=MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=(HostId(0), HostId(1))), arrays=()
)


def test_order_to_audit_holds_for_its_world_alone(link: AgentLink, agent: FakeAgent) -> None:
    in_world(link, agent)
    assert link.audit_step(WORLD.generation) is None
    agent.say(AuditAfter(member=0, generation=WORLD.generation, step=12))
    agent.say(Fence(member=0, generation=2))
    assert link.wait_fenced(1, BOUND_S)  # what was said before it has arrived
    assert link.audit_step(WORLD.generation) == 12
    assert link.audit_step(WORLD.generation + 1) is None


def test_next_agent_is_told_the_layout_again_but_no_checksums(
    spec: JobSpec, link: AgentLink, agent: FakeAgent
) -> None:
    in_world(link, agent)
    link.laid_out(WORLD.generation, LAYOUT)
    link.captured(HostId(0), WORLD.generation, 3, b"12345678", is_audit=False)
    laid_out = LaidOut(member=0, generation=2, layout=LAYOUT)
    captured = Captured(member=0, generation=2, step=3, checksums=b"12345678")
    link.captured(HostId(0), WORLD.generation, 4, b"87654321", is_audit=False)  # tells of the one before
    assert [agent.next(), agent.next()] == [laid_out, captured]
    agent.die()
    successor = FakeAgent(spec)
    heard = [successor.next(), successor.next()]
    assert heard == [Hello(pid=os.getpid(), generation=2), laid_out]
    link.committed(replace(COMMITTED, step=4))
    assert successor.next() == replace(COMMITTED, step=4, checksums=b"87654321")
    link.committed(replace(COMMITTED, step=5))
    assert successor.next() == replace(COMMITTED, step=5)
    successor.say(JobEnded(completed=True))
    agent.connection = successor.connection


def test_copies_left_out_of_a_restore_cross_the_socket_as_they_are(link: AgentLink, agent: FakeAgent) -> None:
    left_out = ((HostId(1), "['w']", ((0, 8), (0, 2))), (HostId(0), "['n']", ()))
    world = replace(WORLD, left_out=left_out)
    agent.say(EnterWorld(world=world))
    assert link.wait_world() == world


# ---- a process that stands by ------------------------------------------------------------------------------


def open_standby(spec: JobSpec, role: str, monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[AgentLink]:
    """Open a link in the role, in a thread: it is there when the process got its turn."""
    monkeypatch.setenv(ENV_STANDBY, role)
    opened: queue.SimpleQueue[AgentLink] = queue.SimpleQueue()
    threading.Thread(target=lambda: opened.put(AgentLink(spec, 0, lambda: None)), daemon=True).start()
    return opened


def test_process_that_stands_by_says_hello_and_goes_on_only_when_it_is_its_turn(
    spec: JobSpec, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_standby(spec, ROLE_WARM, monkeypatch)
    assert agent.next() == Hello(pid=os.getpid(), generation=0)
    assert opened.empty()
    agent.say(TakeTurn())
    link = opened.get(timeout=BOUND_S)
    in_world(link, agent)
    link.left(WORLD.generation)
    assert agent.next() == LeftWorld(member=0, generation=WORLD.generation)
    agent.say(JobEnded(completed=True))


def solo(generation: int, size: int) -> WorldSpec:
    return replace(WORLD, generation=generation, slices=tuple(range(size)), rehearsal=True, solo=True)


def test_process_that_stands_by_plays_worlds_alone_and_tells_when_all_are_over(
    spec: JobSpec, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_standby(spec, ROLE_WARM, monkeypatch)
    agent.next()
    agent.say(Rehearse(worlds=(solo(1, 3), solo(1, 2))))
    link = opened.get(timeout=BOUND_S)
    assert [link.wait_world(), link.rehearsed(1, ""), link.wait_world()] == [solo(1, 3), None, solo(1, 2)]
    assert not link.is_fenced(1)
    link.rehearsed(1, "")
    assert agent.next() == Rehearsed()  # no word of having left a world: that is a worker's
    agent.say(TakeTurn())
    in_world(link, agent)
    agent.say(JobEnded(completed=True))


def test_turn_breaks_off_what_a_process_plays_alone(
    spec: JobSpec, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_standby(spec, ROLE_WARM, monkeypatch)
    agent.next()
    agent.say(Rehearse(worlds=(solo(1, 3), solo(1, 2))))
    link = opened.get(timeout=BOUND_S)
    assert link.wait_world() == solo(1, 3)
    agent.say(TakeTurn())
    agent.say(EnterWorld(world=WORLD))
    wait_until(lambda: link.is_fenced(1))
    link.rehearsed(1, "")
    assert link.wait_world() == WORLD
    assert not link.is_fenced(WORLD.generation)
    agent.say(JobEnded(completed=True))


def test_fence_while_a_worker_plays_alone_is_answered_when_it_is_out(
    link: AgentLink, agent: FakeAgent
) -> None:
    agent.say(EnterWorld(world=solo(2, 2)))
    assert link.wait_world() == solo(2, 2)
    agent.say(Fence(member=0, generation=3))
    wait_until(lambda: link.is_fenced(2))
    link.rehearsed(2, "")
    assert agent.next() == Unwound(generation=3)


def test_world_that_is_taken_back_while_it_is_waited_for_is_not_the_end(
    link: AgentLink, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, is_to_release = iter((False, False)), link._is_to_release
    # Woken for a world that is gone before it is taken: once, then as it is.
    monkeypatch.setattr(link, "_is_to_release", lambda: next(told, None) is None and is_to_release())
    agent.say(EnterWorld(world=WORLD))
    wait_until(lambda: link._next_world)
    agent.say(Fence(member=0, generation=3))
    assert agent.next() == Unwound(generation=3)
    later = replace(WORLD, generation=3)
    agent.say(EnterWorld(world=later))
    assert link.wait_world() == later


def test_process_that_does_not_get_out_of_a_rehearsal_hangs_alone_only_after_its_bound(
    spec: JobSpec, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_standby(spec, ROLE_WARM, monkeypatch)
    agent.next()
    agent.say(Rehearse(worlds=(solo(1, 3),)))
    link = opened.get(timeout=BOUND_S)
    assert link.wait_world() == solo(1, 3)
    assert link._solo_since_s is not None
    for has_turn, bound_s in ((False, agent_link.SOLO_S), (True, agent_link.SOLO_AFTER_TURN_S)):
        if has_turn:
            agent.say(TakeTurn())
            wait_until(lambda: link.is_fenced(1))
        began_s = link._turn_s or link._solo_since_s
        assert not link._hangs_alone(began_s + bound_s * 0.99)
        assert link._hangs_alone(began_s + bound_s * 1.01)
    link.rehearsed(1, "")
    assert not link._hangs_alone(began_s + 1e6)
    agent.say(JobEnded(completed=True))


def test_rehearsal_that_was_given_up_is_told_with_its_reason_and_ends_those_after_it(
    spec: JobSpec, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_standby(spec, ROLE_WARM, monkeypatch)
    agent.next()
    agent.say(Rehearse(worlds=(solo(1, 3), solo(1, 2))))
    link = opened.get(timeout=BOUND_S)
    assert link.wait_world() == solo(1, 3)
    link.rehearsed(1, "no such file")
    assert agent.next() == Rehearsed(error="no such file")
    agent.say(TakeTurn())
    in_world(link, agent)
    agent.say(JobEnded(completed=True))


def test_shadow_has_no_memory_and_tells_only_how_its_step_ended(
    spec: JobSpec, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_standby(spec, ROLE_SHADOW, monkeypatch)
    agent.next()
    agent.say(TakeTurn())
    link = opened.get(timeout=BOUND_S)
    in_world(link, agent)
    assert dict(link.arenas()) == {}
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(1,), hosts=(HostId(0),))
    link.laid_out(WORLD.generation, Layout(mesh=mesh, arrays=(), elastic_axis="data"))
    link.rebuilt(WORLD.generation, None, 0.0, 0.0, 0)
    link.committed(COMMITTED)
    link.preempted()
    link.left(WORLD.generation)
    assert agent.next() == LeftWorld(member=0, generation=WORLD.generation)
    agent.say(JobEnded(completed=True))
