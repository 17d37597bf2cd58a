"""A shard fetched from a peer is the shard captured, and only members of the present generation get it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from snapshot_helpers import HOST, flip, reserve, small_layout, write_into

from reshard.errors import CorruptCopyError, MissingShardError, RetryLaterError, UsageError
from reshard.layout import ArrayLayout, Layout
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.dataplane import DataPlaneServer, fetch
from snapshot.dataplane_pb2 import ReadRequest
from snapshot.dataplane_pb2_grpc import DataPlaneStub
from snapshot.manifest import encode_static, make_static
from snapshot.slot import required_bytes

TOKEN = "job-token"
GENERATION = 3
W_BOX = ((2, 4), (0, 3))


@pytest.fixture
def address(arena: Arena) -> Iterator[str]:
    pool = ThreadPoolExecutor(2)
    server = grpc.server(pool)
    DataPlaneServer(arena, TOKEN, lambda: GENERATION).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()
    pool.shutdown()


def test_fetched_shards_are_the_captured_bytes_in_the_order_asked(arena: Arena, address: str) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    wants = [("w", W_BOX), ("b", ((0, 5),)), ("empty", ((0, 0), (0, 3))), ("w", ((3, 4), (1, 3)))]
    shards = fetch(address, TOKEN, generation=GENERATION, step=5, wants=wants, deadline_s=10)
    piece = np.frombuffer(data[2], np.float32).reshape(2, 3)[1:, 1:].tobytes()
    assert [shard.data.tobytes() for shard in shards] == [data[2], data[0], b"", piece]
    assert [(shard.path, shard.box) for shard in shards] == wants
    assert shards[0].checksum == checksum(data[2])


def test_fetched_shards_can_be_staged_and_read_again(arena: Arena, address: str) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    (shard,) = fetch(address, TOKEN, generation=GENERATION, step=5, wants=[("w", W_BOX)], deadline_s=10)
    staged = arena.write_stage(
        small_layout(), [(shard.path, shard.box, shard.data)], step=5, generation=GENERATION, position=50
    )
    assert staged.checksums == (checksum(data[2]),)


def test_shard_larger_than_a_chunk_arrives_whole(arena: Arena, address: str) -> None:
    nbytes = (5 << 20) // 2 + 1
    layout = Layout(
        mesh=small_layout().mesh,
        arrays=(ArrayLayout(path="big", shape=(nbytes,), dtype="uint8", itemsize=1, spec=((),)),),
    )
    static = make_static(HOST, layout, [("big", ((0, nbytes),))])
    arena.reserve(required_bytes(static))
    writer = arena.slot_for_write(required_bytes(static), 1)
    writer.prepare(static, encode_static(static))
    payload = np.random.default_rng(0).bytes(nbytes)
    writer.shard_views[0][:] = payload
    writer.commit(step=1, generation=1, position=0, checksums=[checksum(payload)])
    (shard,) = fetch(
        address, TOKEN, generation=GENERATION, step=1, wants=[("big", ((0, nbytes),))], deadline_s=20
    )
    assert shard.data.tobytes() == payload


@pytest.mark.parametrize("token", ["", "job-toke", "job-token2", "wrong"])
def test_wrong_token_is_refused(arena: Arena, address: str, token: str) -> None:
    reserve(arena)
    write_into(arena, 5)
    with pytest.raises(UsageError, match="wrong or missing job token"):
        fetch(address, token, generation=GENERATION, step=5, wants=[("w", W_BOX)], deadline_s=10)


def test_call_without_a_token_is_refused(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = DataPlaneStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Read(ReadRequest(generation=GENERATION, step=5), timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_stale_generation_is_refused_and_a_newer_one_served(arena: Arena, address: str) -> None:
    reserve(arena)
    write_into(arena, 5)
    with pytest.raises(UsageError, match="stale generation 2, the job is at 3"):
        fetch(address, TOKEN, generation=GENERATION - 1, step=5, wants=[("w", W_BOX)], deadline_s=10)
    fetch(address, TOKEN, generation=GENERATION + 1, step=5, wants=[("w", W_BOX)], deadline_s=10)


def test_corrupt_shard_is_never_sent(arena: Arena, address: str) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    path = arena.directory / "slot0"
    flip(path, path.read_bytes().index(data[2]))
    with pytest.raises(CorruptCopyError, match="do not match their checksum"):
        fetch(address, TOKEN, generation=GENERATION, step=5, wants=[("w", W_BOX)], deadline_s=10)


def test_bytes_damaged_on_the_way_are_noticed_by_the_receiver(
    arena: Arena, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(arena)
    write_into(arena, 5)
    monkeypatch.setattr("snapshot.dataplane._chunks", damaged_chunks)
    with pytest.raises(CorruptCopyError, match=r"w \[2:4, 0:3\] was damaged on its way"):
        fetch(address, TOKEN, generation=GENERATION, step=5, wants=[("w", W_BOX)], deadline_s=10)


def damaged_chunks(index: int, data: np.ndarray) -> Iterator[object]:
    from snapshot.dataplane_pb2 import ReadChunk

    payload = data.tobytes()
    yield ReadChunk(want_index=index, data=payload[:-1] + b"!", is_last=True, checksum=checksum(payload))


def test_shard_that_the_peer_lacks_is_named(arena: Arena, address: str) -> None:
    reserve(arena)
    write_into(arena, 5)
    wants = [("w", W_BOX), ("w", ((0, 2), (0, 3)))]
    with pytest.raises(MissingShardError, match=r"'w', box \[0:2, 0:3\] at step 5 \(lost: 127"):
        fetch(address, TOKEN, generation=GENERATION, step=5, wants=wants, deadline_s=10)
    with pytest.raises(MissingShardError, match="at step 6"):
        fetch(address, TOKEN, generation=GENERATION, step=6, wants=wants, deadline_s=10)


def test_unreachable_peer_is_given_up_at_the_deadline() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RetryLaterError, match=address):
            fetch(address, TOKEN, generation=1, step=1, wants=[("w", W_BOX)], deadline_s=0.5)


def test_peer_that_comes_up_late_is_reached(arena: Arena) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    with socket.socket() as placeholder:
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        placeholder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{placeholder.getsockname()[1]}"
        with ThreadPoolExecutor(2) as pool:
            pending = pool.submit(
                fetch, address, TOKEN, generation=GENERATION, step=5, wants=[("w", W_BOX)], deadline_s=20
            )
            server = grpc.server(pool)
            DataPlaneServer(arena, TOKEN, lambda: GENERATION).add_to(server)
            server.add_insecure_port(address)
            server.start()
            assert pending.result()[0].data.tobytes() == data[2]
            server.stop(None).wait()


def test_empty_token_is_refused_at_the_server(arena: Arena) -> None:
    with pytest.raises(UsageError, match="must not be empty"):
        DataPlaneServer(arena, "", lambda: 1)
