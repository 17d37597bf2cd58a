"""A box fetched from peers is the box captured, or the error says which is not there, and why."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from dataplane_helpers import BIG, BIG_BOX, GENERATION, TOKEN, W_BOX, Peer, Proxy, capture, get
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshot_helpers import flip, reserve, small_layout, write_into
from waiting import wait_until

from reshard.boxes import Box, full_box, relative_slices
from reshard.errors import CorruptCopyError, MissingShardError, UsageError
from snapshot import dataplane_slots, dataplane_work
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.dataplane import (
    DataPlaneServer,
    NotCapturedYetError,
    OverwrittenError,
    Wanted,
    fetch,
)


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


@pytest.fixture
def small_blocks(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """A peer that cuts pieces in blocks of 16 bytes; all examples of a property share it."""
    monkeypatch.setattr("snapshot.dataplane_find.BLOCK_BYTES", 16)
    with Peer(root, 1, {"x": np.zeros((7, 7, 7, 7), np.float32)}) as peer:
        yield peer


@settings(
    max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_piece_of_any_stored_box_arrives_whole_whatever_the_block_size(
    small_blocks: Peer, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    ranges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    piece: Box = tuple((start, stop) for start, stop in ranges)
    value = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    capture(small_blocks.arena, {"x": value}, 5)
    got, _ = get([("x", piece, small_blocks.address)])
    assert got[0] == value[relative_slices(piece, full_box(shape))].tobytes()


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
    assert write_into(arena, 5) == data
    path = arena.directory / "slot0"
    flip(path, path.read_bytes().index(data[2]))
    assert get([("w", W_BOX, address)])[0] == [data[2]]


def test_what_is_staged_is_not_served(arena: Arena, address: str) -> None:
    reserve(arena)
    write_into(arena, 6)
    staged = [("w", W_BOX, bytes(24))]
    arena.write_stage(small_layout(), staged, step=5, generation=1, position=0)
    with pytest.raises(MissingShardError):
        get([("w", W_BOX, address)])


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
