"""Peers that stall, die, come late or go on, and connections that break, cost time and no byte."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from dataplane_helpers import BIG, BIG_BOX, GENERATION, TOKEN, W_BOX, Peer, Proxy, get
from snapshot_helpers import reserve, write, write_into

from reshard.boxes import Box
from reshard.errors import RetryLaterError
from snapshot import dataplane_work
from snapshot.arena import Arena
from snapshot.dataplane import (
    DataPlaneServer,
    NotCapturedYetError,
    OverwrittenError,
)


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
