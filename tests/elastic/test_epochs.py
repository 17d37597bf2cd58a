"""Epochs on the wire: agents refuse a stale coordinator, a coordinator that is stale ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic import control_pb2 as pb
from elastic.agent_said import Said
from elastic.agent_stream import CoordinatorStream, StreamLost
from elastic.arbiter import FencedError
from elastic.control_channel import bearer, write_place
from elastic.control_pb2_grpc import ControlStub
from elastic.control_server import CLOSED, make_server
from elastic.coordinator import Coordinator
from elastic.events import (
    AgentAttached,
    DigestDone,
    EndWorker,
    Fenced,
    Persisted,
    PersistSettled,
    PreemptionNotice,
    SharePersisted,
    WorkerFailed,
    WorkerState,
)
from elastic.job import HISTORY_FILE, JobSpec
from elastic.mandate import FreeMandate
from elastic.protocol import CONTROL_CODEC, CommitsKept, StepTold
from elastic.records import CoordinatorStarted, RunStarted, StepCommitted, of_kind, read_history
from elastic.state import Config

BOUND_S = 20.0
ATTACHED = AgentAttached(
    member=0, worker=WorkerState.NONE, worker_pid=0, generation=0, data_address="", agent_pid=1
)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return JobSpec(
        job_id="test", directory=tmp_path, adapter="multicontroller", in_place="proven",
        simulated_faults=False, command=("true",), service_command=(), config=Config(num_slices=2),
    )  # fmt: skip


class Epoch(FreeMandate):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    @property
    def epoch(self) -> int:
        return self._epoch


class Served:
    """A coordinator that decides in a thread, and a caller of it."""

    def __init__(self, spec: JobSpec, epoch: int) -> None:
        self.fenced: queue.SimpleQueue[FencedError] = queue.SimpleQueue()
        self.coordinator = Coordinator(spec, "right", Epoch(epoch), self.fenced.put)
        self.server, address = make_server(self.coordinator, "right", 2, bind_host="127.0.0.1", tls=None)
        self.server.start()
        write_place(spec.directory, address, None, epoch)
        self.channel = grpc.insecure_channel(address)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.coordinator.run()
        except FencedError as error:
            self.fenced.put(error)

    def attach(self, epoch: int) -> Iterator[pb.Envelope]:
        kind, body = CONTROL_CODEC.encode(ATTACHED)
        first = pb.Envelope(member=0, kind=kind, body=body, epoch=epoch)
        requests: queue.SimpleQueue[pb.Envelope] = queue.SimpleQueue()
        requests.put(first)
        replies: Iterator[pb.Envelope] = ControlStub(self.channel).Attach(
            iter(requests.get, None), metadata=bearer("right")
        )
        return replies

    def close(self) -> None:
        self.coordinator.stop("the test is over")
        self.channel.close()
        self.thread.join(BOUND_S)
        self.server.stop(grace=None).wait()
        self.coordinator.close()


@pytest.fixture
def serve(spec: JobSpec) -> Iterator[Any]:
    made: list[Served] = []

    def build(epoch: int) -> Served:
        made.append(Served(spec, epoch))
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_every_command_carries_the_epoch(serve: Any) -> None:
    replies = serve(3).attach(epoch=2)
    assert [next(replies).epoch for _ in range(2)] == [3, 3]


def test_coordinator_ends_when_an_agent_has_heard_from_a_later_one(serve: Any) -> None:
    served = serve(3)
    replies = served.attach(epoch=4)
    error = served.fenced.get(timeout=BOUND_S)
    assert "slice 0 has heard from a coordinator of epoch 4, this is epoch 3" in error.message
    assert not served.coordinator.may_command()
    del replies


def test_second_coordinator_goes_on_in_the_same_history(serve: Any, spec: JobSpec) -> None:
    first = serve(1)
    next(first.attach(epoch=0))
    first.coordinator._mandate.lose("killed")
    first.thread.join(BOUND_S)
    second = serve(2)
    next(second.attach(epoch=1))
    records = list(read_history(spec.directory / HISTORY_FILE))
    assert len(of_kind(records, RunStarted)) == 1
    started = of_kind(records, CoordinatorStarted)
    assert [(one.epoch, one.phase) for one in started] == [(1, ""), (2, "WAITING")]


# ---- the agent's side --------------------------------------------------------------------------------------


class Desk:
    """A coordinator of which tests say what it sends."""

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.attached: queue.SimpleQueue[pb.Envelope] = queue.SimpleQueue()
        self.num_attached = 0

    def attach(self, first: pb.Envelope) -> queue.SimpleQueue[Any]:
        self.num_attached += 1
        self.attached.put(first)
        return self.outbox

    def close(self) -> None:
        """End the streams that wait for something to send: their threads would keep the process."""
        for _ in range(self.num_attached):
            self.outbox.put(CLOSED)

    def say(self, epoch: int, why: str) -> None:
        kind, body = CONTROL_CODEC.encode(EndWorker(member=0, why=why))
        self.outbox.put(pb.Envelope(kind=kind, body=body, epoch=epoch))

    def may_command(self) -> bool:
        return True

    def hear(self, *_: Any) -> None: ...
    def detach(self, *_: Any) -> None: ...
    def refuse(self, *_: Any, **__: Any) -> None: ...
    def note(self, *_: Any) -> None: ...
    def stop(self, *_: Any) -> None: ...
    def status(self) -> bytes:
        return b""


@pytest.fixture
def desks(spec: JobSpec) -> Iterator[Any]:
    servers = []

    def build(epoch: int) -> Desk:
        desk = Desk()
        server, address = make_server(desk, "right", 2, bind_host="127.0.0.1", tls=None)
        server.start()
        servers.append((server, desk))
        write_place(spec.directory, address, None, epoch)
        return desk

    yield build
    for server, desk in servers:
        desk.close()
        server.stop(grace=None).wait()


def test_agent_refuses_a_lower_epoch_counts_it_and_attaches_again(spec: JobSpec, desks: Any) -> None:
    desk = desks(5)
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    refused: queue.SimpleQueue[str] = queue.SimpleQueue()
    stream = CoordinatorStream(spec, "right", 0, heard.put, refused.put)
    stream.attach(0, ATTACHED)
    desk.say(5, "first")
    desk.say(6, "second")
    desk.say(5, "stale")
    assert [heard.get(timeout=BOUND_S).why for _ in range(2)] == ["first", "second"]
    assert refused.get(timeout=BOUND_S) == "the coordinator of epoch 5"
    assert isinstance(heard.get(timeout=BOUND_S), StreamLost)
    assert stream.epoch == 6
    stream.close()


def test_agent_tells_the_highest_epoch_it_has_seen_and_finds_the_next_place_at_once(
    spec: JobSpec, desks: Any
) -> None:
    first = desks(1)
    stream = CoordinatorStream(spec, "right", 0, lambda item: None)
    stream.attach(0, ATTACHED)
    assert first.attached.get(timeout=BOUND_S).epoch == 1
    assert not stream.is_elsewhere()
    assert not stream.is_elsewhere()
    second = desks(2)
    assert stream.is_elsewhere()
    stream.attach(0, ATTACHED)
    assert second.attached.get(timeout=BOUND_S).epoch == 2
    assert not stream.is_elsewhere()
    stream.close()


def told(step: int, generation: int = 1) -> StepTold:
    record = StepCommitted(
        unix_s=0.0, generation=generation, slice_index=0, step=step, position=0, sample_ids=(), loss=None,
        step_s=0.1, stall_s=0.0, captured_bytes=1,
    )  # fmt: skip
    return StepTold(record=record)


def test_commits_are_told_again_until_they_are_in_the_history() -> None:
    said = Said()
    for step in range(5):
        said.note(told(step))
    said.kept(CommitsKept(member=0, generation=1, step=2))
    assert list(said.again(1)) == [told(3), told(4)]
    said.kept(CommitsKept(member=0, generation=2, step=-1))
    assert list(said.again(2)) == []


def test_words_of_a_world_that_is_over_are_not_told_again_those_of_the_worker_and_the_disk_are() -> None:
    said = Said()
    fenced = Fenced(member=0, generation=1, worker=WorkerState.READY, snapshots=())
    digest = DigestDone(member=0, generation=1, step=3, purpose="captured", digest="a")
    restored = DigestDone(member=0, generation=1, step=3, purpose="restored", digest="a")
    persisted = Persisted(member=0, generation=1, step=3)
    failed, notice = WorkerFailed(member=0, error="mine"), PreemptionNotice(member=0)
    share = SharePersisted(member=0, generation=1, step=3)
    for word in (fenced, digest, restored, persisted, failed, notice, share):
        said.note(word)
    assert list(said.again(1)) == [fenced, digest, restored, persisted, failed, notice, share]
    assert list(said.again(2)) == [persisted, failed, notice]
    said.settled(PersistSettled(member=0, generation=1, step=3, failed=False))
    said.forget()
    assert list(said.again(1)) == [failed, notice]
    said.forget_worker()
    assert list(said.again(1)) == []
