"""A box fetched from peers is the box captured, whatever happens on the way; only the job's agents get it."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from dataplane_helpers import GENERATION, TOKEN, Peer, Proxy, capture, get
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_helpers import flip, reserve, small_layout, write, write_into

from reshard.boxes import Box, full_box, relative_slices
from reshard.errors import CorruptCopyError, MissingShardError, RetryLaterError, UsageError
from snapshot import dataplane_server, dataplane_slots, dataplane_work
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.dataplane import (
    DataPlaneServer,
    NotCapturedYetError,
    OverwrittenError,
    TlsFiles,
    Wanted,
    fetch,
)
from snapshot.dataplane_auth import MAGIC, authenticate, tls_files

W_BOX = ((2, 4), (0, 3))
BIG = 3 << 20
"""Elements of the big array: 12 MiB, so that it takes many blocks."""


@pytest.fixture
def server(arena: Arena) -> Iterator[DataPlaneServer]:
    made = DataPlaneServer(arena, TOKEN, lambda: GENERATION)
    made.start()
    yield made
    made.close()


@pytest.fixture
def address(server: DataPlaneServer) -> str:
    return server.address


@pytest.fixture(scope="module")
def big_state() -> dict[str, np.ndarray]:
    return {"big": np.random.default_rng(0).standard_normal(BIG, np.float32)}


BIG_BOX = ((0, BIG),)


# ---- what arrives ----


def test_fetched_boxes_are_the_captured_bytes_with_their_checksums(arena: Arena, address: str) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    wants: list[tuple[str, Box, str]] = [
        ("w", W_BOX, address),
        ("empty", ((0, 0), (0, 3)), address),
        ("w", ((3, 4), (1, 3)), address),
        ("w", ((3, 4), (0, 3)), address),
        ("w", ((2, 4), (1, 2)), address),
    ]
    got, fetched = get(wants)
    rows = np.frombuffer(data[2], np.float32).reshape(2, 3)
    pieces = [rows, rows[:0], rows[1:, 1:], rows[1:], rows[:, 1:2]]
    assert got == [piece.tobytes() for piece in pieces]
    assert fetched.checksums == tuple(checksum(piece.tobytes()) for piece in pieces)
    assert fetched.bytes_from == {address: sum(piece.nbytes for piece in pieces)}


def test_fetched_boxes_can_be_staged_in_place_and_read_again(arena: Arena, address: str) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    with arena.stage_writer(small_layout(), [("w", W_BOX)]) as stage:
        fetched = fetch(
            [Wanted(path="w", box=W_BOX, sources=(address,), into=stage.shard_views[0])],
            token=TOKEN,
            generation=GENERATION,
            step=5,
            deadline_s=10,
        )
        stage.commit(step=9, generation=GENERATION, position=50, checksums=fetched.checksums)
    assert [holding.step for holding in arena.verified_holdings(9).holdings] == [9]
    assert fetched.checksums == (checksum(data[2]),)


@settings(max_examples=25)
@given(data=st.data())
def test_any_piece_of_any_stored_box_arrives_whole_whatever_the_block_size(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    ranges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    piece: Box = tuple((start, stop) for start, stop in ranges)
    value = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    got, _ = get([("x", piece, piece_peer(value))])
    assert got[0] == value[relative_slices(piece, full_box(shape))].tobytes()


_peers: dict[str, Peer] = {}


def piece_peer(value: np.ndarray) -> str:
    capture_step = _peers["one"].arena
    capture(capture_step, {"x": value}, 5)
    return _peers["one"].address


@pytest.fixture(autouse=True)
def one_peer(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A peer that the examples of one property share; blocks of 16 bytes."""
    if "any_piece" not in request.node.name:
        yield
        return
    monkeypatch.setattr("snapshot.dataplane_find.BLOCK_BYTES", 16)
    with Peer(root, 1, {"x": np.zeros((7, 7, 7, 7), np.float32)}) as peer:
        _peers["one"] = peer
        yield
    _peers.clear()


def test_many_small_boxes_are_served_from_one_look_at_the_manifest(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"layer{index}": np.full((3, 5), index, np.float32) for index in range(500)}
    parsed = []
    read = dataplane_slots.SlotReader.read_manifest
    monkeypatch.setattr(
        dataplane_slots.SlotReader, "read_manifest", lambda reader: parsed.append(reader.path) or read(reader)
    )
    with Peer(root, 1, state) as peer:
        parsed.clear()  # of what making the slots looked at
        for _ in range(3):
            got, _ = get([(path, ((0, 3), (0, 5)), peer.address) for path in state])
            assert got == [value.tobytes() for value in state.values()]
    assert [path.name for path in parsed].count("slot0") == 1


def open_slot_files() -> int:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("/slot" in name for name in names)


def test_server_keeps_no_file_open_between_requests(root: Path, big_state: dict[str, np.ndarray]) -> None:
    with Peer(root, 1, big_state) as peer:
        of_the_worker = open_slot_files()
        get([("big", BIG_BOX, peer.address)])
        wait_until(lambda: open_slot_files() == of_the_worker)


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s
        threading.Event().wait(0.01)


# ---- who is served ----


@pytest.mark.parametrize("token", ["", "job-toke", "job-token2", "wrong"])
def test_wrong_token_is_refused_and_counted(arena: Arena, server: DataPlaneServer, token: str) -> None:
    reserve(arena)
    write_into(arena, 5)
    with pytest.raises(UsageError, match="wrong or missing job token"):
        get([("w", W_BOX, server.address)], token=token)
    assert server.refused == 1


def test_stale_generation_is_refused_and_counted_and_a_newer_one_served(
    arena: Arena, server: DataPlaneServer
) -> None:
    reserve(arena)
    write_into(arena, 5)
    with pytest.raises(UsageError, match="stale generation 2, the job is at 3"):
        get([("w", W_BOX, server.address)], generation=GENERATION - 1)
    assert server.refused == 1
    get([("w", W_BOX, server.address)], generation=GENERATION + 1)


def test_empty_token_is_refused_at_the_server(arena: Arena) -> None:
    with pytest.raises(UsageError, match="must not be empty"):
        DataPlaneServer(arena, "", lambda: 1)


def test_token_never_travels_and_a_recorded_proof_is_of_no_use(arena: Arena, server: DataPlaneServer) -> None:
    reserve(arena)
    write_into(arena, 5)
    said = bytearray()

    def listen() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection(("127.0.0.1", int(server.address.split(":")[1]))) as far:
            near.sendall(far.recv(40, socket.MSG_WAITALL))
            said.extend(near.recv(72, socket.MSG_WAITALL))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        heard = pool.submit(listen)
        with pytest.raises(RetryLaterError):
            get([("w", W_BOX, f"127.0.0.1:{listener.getsockname()[1]}")], deadline_s=0.5)
        heard.result()
    assert TOKEN.encode() not in said
    with socket.create_connection(("127.0.0.1", int(server.address.split(":")[1]))) as replay:
        replay.recv(40, socket.MSG_WAITALL)
        replay.sendall(said)
        assert replay.recv(33, socket.MSG_WAITALL)[:1] == b"\1"
    assert server.refused == 1


def test_server_that_does_not_know_the_token_is_not_believed() -> None:
    def pretend() -> None:
        near, _ = listener.accept()
        with near:
            near.sendall(MAGIC + bytes(32))
            near.recv(72, socket.MSG_WAITALL)
            near.sendall(b"\0" + bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(pretend)
        with pytest.raises(UsageError, match="does not know the job's token"):
            get([("w", W_BOX, f"127.0.0.1:{listener.getsockname()[1]}")])


def test_strangers_that_say_nothing_or_garbage_hold_up_nobody(
    arena: Arena, server: DataPlaneServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane_server, "MAX_STRANGERS", 4)
    monkeypatch.setattr(dataplane_server, "HANDSHAKE_S", 50.0)
    reserve(arena)
    data = write_into(arena, 5)
    target = ("127.0.0.1", int(server.address.split(":")[1]))
    silent = [socket.create_connection(target) for _ in range(12)]
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), MAGIC, MAGIC + bytes(64), b"\0" * 10_000):
        with socket.create_connection(target) as stranger:
            stranger.sendall(garbage)
    got, _ = get([("w", W_BOX, server.address)])
    assert got == [data[2]]
    for dropped in silent[:8]:  # though they had time left
        dropped.settimeout(10)
        assert dropped.recv(100, socket.MSG_WAITALL)[40:] == b""
    for each in silent:
        each.close()


def test_garbage_from_an_admitted_caller_ends_its_connection_alone(
    arena: Arena, server: DataPlaneServer
) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    target = ("127.0.0.1", int(server.address.split(":")[1]))
    for garbage in (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\5\0\0\0hello", b"\1\0\0\0\x90"):
        with socket.create_connection(target) as caller:
            authenticate(caller, TOKEN.encode(), server.address)
            caller.sendall(garbage)
            caller.settimeout(10)
            assert caller.recv(1) == b""
    assert get([("w", W_BOX, server.address)])[0] == [data[2]]


def test_callers_beyond_the_bound_are_served_later(
    root: Path, big_state: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane_server, "MAX_CALLERS", 1)
    gate = threading.Event()

    def hold(number: int, passed: int, data: bytes) -> bytes:
        if passed > 1 << 20:
            gate.wait(20)
        return data

    with Peer(root, 1, big_state) as peer, Proxy(peer.address, hold) as proxy, ThreadPoolExecutor(2) as pool:
        first = pool.submit(get, [("big", BIG_BOX, proxy.address)])
        wait_until(lambda: proxy.passed_bytes > 1 << 20)
        second = pool.submit(get, [("big", BIG_BOX, peer.address)])
        gate.set()
        assert first.result()[0] == second.result()[0] == [big_state["big"].tobytes()]


# ---- what cannot be served ----


def test_corrupt_shard_is_found_and_named_and_another_source_used(
    root: Path, big_state: dict[str, np.ndarray]
) -> None:
    with Peer(root, 1, big_state) as bad, Peer(root, 2, big_state) as good:
        bad.writer.shard_views[0][BIG] ^= 1
        with pytest.raises(CorruptCopyError, match=r"slot0: step 5: bytes of 'big' .* do not match"):
            get([("big", BIG_BOX, bad.address)])
        with pytest.raises(CorruptCopyError, match="do not match"):
            get([("big", ((1, 7),), bad.address)])
        got, fetched = get([("big", BIG_BOX, (bad.address, good.address))])
        assert got == [big_state["big"].tobytes()]
        assert fetched.bytes_from[good.address] >= 4 * BIG


def test_corrupt_copy_is_passed_over_for_another_in_the_same_arena(arena: Arena, address: str) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    arena.write_stage(small_layout(), [("w", W_BOX, data[2])], step=5, generation=1, position=0)
    path = arena.directory / "slot0"
    flip(path, path.read_bytes().index(data[2]))
    assert get([("w", W_BOX, address)])[0] == [data[2]]


def test_bytes_damaged_on_the_way_are_noticed_and_fetched_again(
    root: Path, big_state: dict[str, np.ndarray]
) -> None:
    def damage(number: int, passed: int, data: bytes) -> bytes:
        hit = number == 0 and passed < 1 << 20 <= passed + len(data)
        return bytes([data[0] ^ 1]) + data[1:] if hit and passed else data

    def always(number: int, passed: int, data: bytes) -> bytes:
        inside = 1 <= passed % (4 * BIG) >> 20 < 11  # of the bytes of the box, not of a head or a trailer
        return bytes([data[0] ^ 1]) + data[1:] if inside else data

    with Peer(root, 1, big_state) as peer:
        with Proxy(peer.address, damage) as proxy:
            assert get([("big", BIG_BOX, proxy.address)])[0] == [big_state["big"].tobytes()]
        with (
            Proxy(peer.address, always) as proxy,
            pytest.raises(CorruptCopyError, match="damaged on its way"),
        ):
            get([("big", BIG_BOX, proxy.address)])


def test_shard_that_the_peer_lacks_is_named(arena: Arena, address: str) -> None:
    reserve(arena)
    write_into(arena, 5)
    with pytest.raises(MissingShardError, match=r"'w', box \[0:2, 0:3\] at step 5 \(lost: 127"):
        get([("w", W_BOX, address), ("w", ((0, 2), (0, 3)), address)])


def test_source_that_lacks_a_box_is_passed_over_and_said(
    arena: Arena, address: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane_work, "SLOW_S", 60.0)
    reserve(arena)
    data = write_into(arena, 5)
    asked = threading.Event()

    def after_the_other(number: int, passed: int, data: bytes) -> bytes:
        asked.wait(10)
        return data

    with Peer(root, 2, {"x": np.ones(3, np.float32)}) as other, Proxy(address, after_the_other) as proxy:
        other.server._current_generation = lambda: asked.set() or GENERATION
        got, fetched = get([("w", W_BOX, (other.address, proxy.address))])
    assert got == [data[2]]
    assert fetched.bytes_from == {other.address: 0, proxy.address: len(data[2])}
    assert len(fetched.rejected) == 1
    assert other.address in fetched.rejected[0]


def test_buffer_of_another_size_is_refused(arena: Arena, address: str) -> None:
    reserve(arena)
    write_into(arena, 5)
    with pytest.raises(UsageError, match="has 24 bytes, the buffer 12"):
        get([("w", W_BOX, address)], itemsize=2)
    with pytest.raises(UsageError, match="bytes 0:48 of a box of 24 bytes"):
        get([("w", W_BOX, address)], itemsize=8)


def test_step_to_come_and_step_gone_are_told_apart(arena: Arena, address: str) -> None:
    reserve(arena)
    with pytest.raises(NotCapturedYetError, match=r"step 5 is not here \(held: none\)"):
        get([("w", W_BOX, address)])
    for step in (6, 7):
        write_into(arena, step)
    with pytest.raises(OverwrittenError, match="at step 5"):
        get([("w", W_BOX, address)])
    with pytest.raises(NotCapturedYetError, match=r"step 8 is not here \(held: 6, 7\)"):
        get([("w", W_BOX, address)], step=8)
    with pytest.raises(NotCapturedYetError):
        get([("w", W_BOX, address)], step=7, of_generation=2)


def test_step_to_come_is_waited_for_when_told_so(arena: Arena, server: DataPlaneServer) -> None:
    reserve(arena)
    write_into(arena, 4)
    asked = threading.Event()

    def generation() -> int:
        asked.set()
        return GENERATION

    server._current_generation = generation
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(get, [("w", W_BOX, server.address)], await_capture=True)
        assert asked.wait(10)
        data = write_into(arena, 5)
        assert pending.result()[0] == [data[2]]


def test_slot_overwritten_while_it_is_sent_is_never_taken(
    root: Path, big_state: dict[str, np.ndarray]
) -> None:
    with Peer(root, 1, big_state) as peer:

        def overwrite(number: int, passed: int, data: bytes) -> bytes:
            if passed > 1 << 20 and peer.writer.order == (1, 5):
                peer.writer.begin()
                peer.writer.shard_views[0][:] = bytes(4 * BIG)
                peer.writer.commit(step=7, generation=1, position=0, checksums=[checksum(bytes(4 * BIG))])
            return data

        with Proxy(peer.address, overwrite) as proxy, pytest.raises(OverwrittenError, match="at step 5"):
            get([("big", BIG_BOX, proxy.address)])


# ---- what breaks ----


def test_unreachable_peer_is_given_up_at_the_deadline() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RetryLaterError, match=f"{address}.*refused"):
            get([("w", W_BOX, address)], deadline_s=0.3)


def test_peer_that_comes_up_late_is_reached(arena: Arena) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    with socket.socket() as placeholder, ThreadPoolExecutor(1) as pool:
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        pending = pool.submit(get, [("w", W_BOX, f"127.0.0.1:{port}")])
        placeholder.close()
        late = DataPlaneServer(arena, TOKEN, lambda: GENERATION, port=port)
        late.start()
        assert pending.result()[0] == [data[2]]
        late.close()


@pytest.mark.parametrize("seed", range(4))
def test_transfer_cut_at_random_bytes_goes_on_where_it_was(
    root: Path, big_state: dict[str, np.ndarray], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cuts = [int(rng.integers(1, 2_000_000)) for _ in range(3)]
    boxes: list[Box] = [BIG_BOX, ((5, BIG // 2),)]  # a whole shard, and a piece

    def cut(number: int, passed: int, data: bytes) -> bytes | None:
        return (data[: cuts[number] - passed] or None) if number < len(cuts) else data

    with Peer(root, 1, big_state) as peer:
        for box in boxes:
            with Proxy(peer.address, cut) as proxy:
                got, fetched = get([("big", box, proxy.address)])
                assert got == [big_state["big"][slice(*box[0])].tobytes()]
                assert proxy.num_connections == 4
                assert fetched.bytes_from == {proxy.address: len(got[0])}  # not a byte twice


def test_source_that_dies_leaves_its_part_to_another(root: Path, big_state: dict[str, np.ndarray]) -> None:
    with Peer(root, 1, big_state) as doomed, Peer(root, 2, big_state) as peer:

        def die(number: int, passed: int, data: bytes) -> bytes | None:
            return None if passed > 1 << 20 or number else data

        with Proxy(doomed.address, die) as proxy:
            got, fetched = get([("big", BIG_BOX, (proxy.address, peer.address))])
        assert got == [big_state["big"].tobytes()]
        assert sum(fetched.bytes_from.values()) == 4 * BIG


def test_stalled_source_holds_nothing_up(
    root: Path, big_state: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane_work, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(dataplane_work, "BATCH_BYTES", 1 << 20)
    gate = threading.Event()
    started = threading.Event()

    def stall(number: int, passed: int, data: bytes) -> bytes:
        if passed > 300_000:
            started.set()
            gate.wait(30)
        return data

    def second(number: int, passed: int, data: bytes) -> bytes:
        started.wait(10)  # the other one has work, and is stuck with it
        return data

    with (
        Peer(root, 1, big_state) as slow,
        Peer(root, 2, big_state) as fast,
        Proxy(slow.address, stall) as stalled,
        Proxy(fast.address, second) as free,
    ):
        got, fetched = get([("big", BIG_BOX, (stalled.address, free.address))])
        gate.set()
    assert got == [big_state["big"].tobytes()]
    assert fetched.num_taken_over >= 1
    assert fetched.bytes_from[free.address] > 3 * BIG
    assert 0 < fetched.bytes_from[stalled.address] < BIG


def test_two_sources_share_the_work_and_the_faster_does_more(
    root: Path, big_state: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane_work, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(dataplane_work, "BATCH_BYTES", 1 << 20)
    over = threading.Event()
    started = threading.Event()

    def limit(number: int, passed: int, data: bytes) -> bytes:
        if passed > 300_000:
            started.set()
            over.wait(0.02)  # at most 64 KiB each: 3 MB/s
        return data

    def second(number: int, passed: int, data: bytes) -> bytes:
        started.wait(10)
        return data

    with (
        Peer(root, 1, big_state) as one,
        Peer(root, 2, big_state) as two,
        Proxy(one.address, limit) as limited,
        Proxy(two.address, second) as free,
    ):
        got, fetched = get([("big", BIG_BOX, (limited.address, free.address))])
        over.set()
    assert got == [big_state["big"].tobytes()]
    assert 0 < fetched.bytes_from[limited.address] < fetched.bytes_from[free.address]
    assert sum(fetched.bytes_from.values()) == 4 * BIG


def test_slow_caller_holds_no_other_up(root: Path, big_state: dict[str, np.ndarray]) -> None:
    gate = threading.Event()

    def hold(number: int, passed: int, data: bytes) -> bytes:
        if passed > 1 << 20:
            gate.wait(30)
        return data

    with Peer(root, 1, big_state) as peer, Proxy(peer.address, hold) as proxy, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(get, [("big", BIG_BOX, proxy.address)])
        for _ in range(3):
            assert get([("big", BIG_BOX, peer.address)])[0] == [big_state["big"].tobytes()]
        assert not slow.done()
        gate.set()
        assert slow.result()[0] == [big_state["big"].tobytes()]


def test_peer_that_captures_on_is_read_whole_or_not_at_all(arena: Arena, address: str) -> None:
    reserve(arena)
    written = {1: write_into(arena, 1)[2]}
    go: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def work() -> None:
        while go.get():
            step = max(written) + 1
            written[step] = write(arena.slot_for_write(8192, step), step)[2]

    rng = np.random.default_rng(0)
    outcomes: Counter[str] = Counter()
    with ThreadPoolExecutor(1) as worker:
        done = worker.submit(work)
        for _ in range(150):
            step = max(written)
            for _ in range(rng.integers(0, 4)):
                go.put(True)
            try:
                got, _ = get([("w", W_BOX, address)], step=step)
            except (OverwrittenError, NotCapturedYetError) as error:
                outcomes[error.kind] += 1
                continue
            assert got == [written[step]]
            outcomes["read"] += 1
        go.put(False)
        done.result()
    assert outcomes["read"] > 20
    assert outcomes["overwritten"] > 5


def test_closed_server_leaves_no_thread_and_no_descriptor(
    root: Path, big_state: dict[str, np.ndarray]
) -> None:
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    with Peer(root, 1, big_state) as peer:
        get([("big", BIG_BOX, peer.address), ("big", ((1, 9),), peer.address)])
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


# ---- TLS ----


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles]:
    """`shared` is one certificate for all; `stranger` is of nobody we know."""
    made = {}
    for name in ("shared", "stranger"):
        folder = tmp_path_factory.mktemp(name)
        files = TlsFiles(cert=folder / "cert.pem", key=folder / "key.pem")
        subject = ["-subj", f"/CN={name}", "-days", "2"]
        kind = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command = ["openssl", *kind, "-keyout", str(files.key), "-out", str(files.cert), *subject]
        subprocess.run(command, check=True, capture_output=True)
        made[name] = files
    return made


def test_tls_carries_whole_boxes_and_pieces(
    root: Path, big_state: dict[str, np.ndarray], certificates: dict[str, TlsFiles]
) -> None:
    tls = certificates["shared"]
    with Peer(root, 1, big_state, tls=tls) as peer:
        got, _ = get([("big", BIG_BOX, peer.address), ("big", ((3, 1000),), peer.address)], tls=tls)
    assert got == [big_state["big"].tobytes(), big_state["big"][3:1000].tobytes()]


def test_tls_with_another_certificate_is_refused_by_both_sides(
    root: Path, big_state: dict[str, np.ndarray], certificates: dict[str, TlsFiles]
) -> None:
    ours, theirs = certificates["shared"], certificates["stranger"]
    with Peer(root, 1, big_state, tls=ours) as peer:
        with pytest.raises(UsageError, match="TLS: CERTIFICATE_VERIFY_FAILED"):
            get([("big", BIG_BOX, peer.address)], tls=theirs)
        trusting = TlsFiles(cert=theirs.cert, key=theirs.key, ca=ours.cert)
        with pytest.raises(UsageError, match=r"TLS: .*ALERT"):
            get([("big", BIG_BOX, peer.address)], tls=trusting)


def test_tls_caller_of_a_plain_server_is_told_so(
    root: Path, big_state: dict[str, np.ndarray], certificates: dict[str, TlsFiles]
) -> None:
    with Peer(root, 1, big_state) as peer, pytest.raises(UsageError, match="TLS: "):
        get([("big", BIG_BOX, peer.address)], tls=certificates["shared"])


def test_tls_files_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    files = TlsFiles(cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with pytest.raises(UsageError, match=r"cert\.pem"):
        files.server_context()


def test_tls_files_of_a_command_line_are_all_there_and_read_or_none(
    tmp_path: Path, certificates: dict[str, TlsFiles]
) -> None:
    shared = certificates["shared"]
    assert tls_files(None, None, None) is None
    assert tls_files(shared.cert, shared.key, None) == shared
    with pytest.raises(UsageError, match="a certificate and its key"):
        tls_files(shared.cert, None, None)
    with pytest.raises(UsageError, match="cannot be used"):
        tls_files(shared.cert, certificates["stranger"].key, None)
