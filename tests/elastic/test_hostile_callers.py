"""Strangers at the coordinator and at an agent's socket: they cost little, are counted, hold up nobody."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import waiting

from elastic import control_pb2 as pb
from elastic import control_server, worker_socket
from elastic.control_channel import bearer
from elastic.control_pb2_grpc import ControlStub
from elastic.coordinator import Coordinator
from elastic.job import HISTORY_FILE, JobSpec
from elastic.protocol import WORKER_CODEC, Heartbeat, Hello, StateDescribed
from elastic.records import MessageRefused, of_kind, read_history
from elastic.refusals import RefusalsTold, RefusalTally
from elastic.state import Config
from elastic.wire import FramedSocket
from elastic.worker_socket import WorkerSocket

BOUND_S = 20.0
wait_until = partial(waiting.wait_until, within_s=BOUND_S)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection; waits for it, within a bound."""
    connection.settimeout(BOUND_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


# ---- the coordinator ---------------------------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    spec = JobSpec(
        job_id="test", directory=tmp_path, adapter="multicontroller", in_place="proven",
        simulated_faults=False, command=("true",), service_command=(), config=Config(num_slices=2),
    )  # fmt: skip
    made = Coordinator(spec, "right")
    yield made
    made.close()


@pytest.fixture
def address(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(control_server, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(control_server, "MAX_MESSAGE_BYTES", 1 << 20)
    server, address = control_server.make_server(coordinator, "right", 2, bind_host="127.0.0.1", tls=None)
    server.start()
    host, port = address.split(":")
    yield host, int(port)
    server.stop(grace=None).wait()


def is_answered(address: tuple[str, int]) -> bool:
    with grpc.insecure_channel(f"{address[0]}:{address[1]}") as channel:
        reply = ControlStub(channel).Status(
            pb.StatusRequest(), metadata=bearer("right"), timeout=BOUND_S, wait_for_ready=True
        )
    return bool(msgspec.json.decode(reply.status)["phase"] == "WAITING")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        os.urandom(5000),
        HTTP2_PREFACE[:10],
        HTTP2_PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(5000),
        HTTP2_PREFACE + b"\xff\xff\xff\x01\x04\x00\x00\x00\x01" + bytes(5000),
    ],
    ids=["silent", "random", "half a preface", "a frame of 16 MiB", "headers of 16 MiB"],
)
def test_stranger_at_the_coordinator_is_dropped_and_others_are_answered(
    address: tuple[str, int], said: bytes
) -> None:
    strangers = [socket.create_connection(address) for _ in range(40)]
    for stranger in strangers:
        stranger.sendall(said)
    assert is_answered(address)
    for stranger in strangers:
        assert is_closed(stranger)
        stranger.close()


def test_message_of_a_caller_without_the_token_is_not_even_read(
    address: tuple[str, int], coordinator: Coordinator
) -> None:
    large = pb.Envelope(body=bytes(4 << 20))  # beyond what is read of anybody
    with grpc.insecure_channel(f"{address[0]}:{address[1]}") as channel:
        stub = ControlStub(channel)
        for token, code in (
            ("wrong", grpc.StatusCode.UNAUTHENTICATED),
            ("right", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Note(large, metadata=bearer(token), timeout=BOUND_S, wait_for_ready=True)
            assert refused.value.code() is code
    assert msgspec.json.decode(coordinator.status())["refused"] == {"control": {"wrong-token": 1}}
    assert is_answered(address)


def test_many_wrong_tokens_leave_few_records(
    address: tuple[str, int], coordinator: Coordinator, tmp_path: Path
) -> None:
    with grpc.insecure_channel(f"{address[0]}:{address[1]}") as channel:
        for number in range(300):
            with pytest.raises(grpc.RpcError):
                ControlStub(channel).Stop(
                    pb.StopRequest(reason="mine"),
                    metadata=bearer(f"guess {number}"),
                    timeout=BOUND_S,
                    wait_for_ready=True,
                )
    assert msgspec.json.decode(coordinator.status())["refused"] == {"control": {"wrong-token": 300}}
    records = of_kind(list(read_history(tmp_path / HISTORY_FILE)), MessageRefused)
    assert sum(record.num for record in records) == 256
    assert len(records) == 13


# ---- an agent's socket -------------------------------------------------------------------------------------


class Listening:
    """A worker socket, what it heard and what it refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[Any] = []
        self.refused = RefusalTally()
        self._told: list[RefusalsTold] = []
        self.socket = WorkerSocket(path, lambda item: self.heard.append(item[1]), self.refused)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self.path))
        return connection

    def reasons(self) -> dict[str, int]:
        self._told.extend(self.refused.take())
        return {
            reason: sum(one.num for one in self._told if one.reason == reason)
            for reason in {one.reason for one in self._told}
        }


@pytest.fixture
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setattr(worker_socket, "HELLO_S", 0.5)
    made = Listening(tmp_path / "agent.sock")
    yield made
    made.socket.close()


def assert_worker_is_heard(listening: Listening) -> None:
    connection = listening.connect()
    worker = FramedSocket(connection, WORKER_CODEC)
    hello, beat = Hello(pid=os.getpid(), generation=0), Heartbeat(unix_s=1.0)
    worker.send(hello)
    worker.send(beat)
    wait_until(lambda: listening.heard[-2:] == [hello, beat])
    worker.close()


def is_heard(listening: Listening) -> bool:
    """Whether a worker that connects is taken in; where the places are taken it is turned away."""
    before, turned_away = len(listening.heard), listening.reasons().get("too-many", 0)
    worker = FramedSocket(listening.connect(), WORKER_CODEC)
    with contextlib.suppress(BrokenPipeError):
        worker.send(Hello(pid=os.getpid(), generation=0))
    wait_until(lambda: len(listening.heard) > before or listening.reasons().get("too-many", 0) > turned_away)
    worker.close()
    return len(listening.heard) > before


def frame_of(value: Any) -> bytes:
    name, body = WORKER_CODEC.encode(value)
    return struct.pack("<IB", 1 + len(name) + len(body), len(name)) + name.encode() + body


def test_socket_is_its_owners_alone(listening: Listening) -> None:
    assert listening.path.stat().st_mode & 0o7777 == 0o600


def test_mode_of_the_socket_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        made = Listening(tmp_path / "other.sock")
        assert os.umask(0) == 0, "the umask, which other threads use too, is left alone"
    finally:
        os.umask(previous)
    assert made.path.stat().st_mode & 0o7777 == 0o600
    made.socket.close()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\xff\xff\xff\xff", "bad-message"),
        (struct.pack("<I", 32 << 20) + b"\x05Hello", "bad-message"),
        (struct.pack("<I", 5000) + b"\x05Hello", "bad-message"),
        (struct.pack("<I", 0), "bad-message"),
        (struct.pack("<I", 40) + b"\xff" * 40, "bad-message"),
        (struct.pack("<I", 600) + b"\x05Hello" + b"\x91" * 594, "bad-message"),
        (frame_of(Heartbeat(unix_s=1.0)), "unknown-sender"),
        (frame_of(Hello(pid=1, generation=3)), "unknown-sender"),
        (b"", "too-slow"),
        (b"\x10\x00\x00\x00\x05Hel", "too-slow"),
    ],
    ids=[
        "4 GiB", "32 MiB", "5 kB before it said who", "empty", "no name", "deeply nested", "no hello",
        "another's pid", "silent", "half a frame",
    ],
)  # fmt: skip
def test_stranger_at_the_socket_is_refused_and_the_worker_is_heard(
    listening: Listening, said: bytes, reason: str
) -> None:
    stranger = listening.connect()
    stranger.sendall(said)
    assert_worker_is_heard(listening)
    wait_until(lambda: listening.reasons() == {reason: 1})
    assert is_closed(stranger)
    assert not [message for message in listening.heard if isinstance(message, StateDescribed)]
    stranger.close()


def test_caller_that_sends_a_byte_now_and_then_gets_no_more_time(listening: Listening) -> None:
    stranger = listening.connect()
    sent = 0
    try:
        for byte in frame_of(Hello(pid=os.getpid(), generation=0)) * 100:
            stranger.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    except BrokenPipeError:
        pass
    assert sent < 100
    assert listening.reasons() == {"too-slow": 1}
    stranger.close()


def test_strangers_beyond_the_bound_are_turned_away_at_once(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_socket, "HELLO_S", 50.0)
    silent = [listening.connect() for _ in range(worker_socket.MAX_STRANGERS + 3)]
    wait_until(lambda: listening.reasons() == {"too-many": 3})
    assert all(is_closed(each) for each in silent[-3:])
    silent.pop(0).close()
    wait_until(lambda: is_heard(listening))
    for each in silent:
        each.close()


def test_process_of_another_user_is_refused(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(worker_socket, "_peer", lambda connection: (os.getpid(), os.geteuid() + 1))
        stranger = listening.connect()
        with contextlib.suppress(BrokenPipeError):  # it may be closed already
            stranger.sendall(frame_of(Hello(pid=os.getpid(), generation=0)))
        assert is_closed(stranger)
    assert listening.reasons() == {"unknown-sender": 1}
    assert listening.heard == []
    stranger.close()
