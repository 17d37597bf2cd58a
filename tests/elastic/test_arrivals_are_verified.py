"""Wherever bytes of a snapshot arrive, damaged ones are refused; docs/verification.md is the list."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_arenas import GENERATION, elements, layout_of_hosts, made_arenas
from dataplane_helpers import Proxy
from snapshot_helpers import flip

from elastic.agent_buddies import AgentPull
from elastic.agent_fetch import read_pieces
from elastic.agent_tasks import ArenaTasks
from elastic.events import ComputeDigest, Stage
from reshard.boxes import Box
from reshard.errors import CorruptCopyError, MissingShardError
from reshard.ids import HostId
from reshard.redundancy import BuddyCopy
from reshard.transfer import Transfer
from snapshot.arena import Arena
from snapshot.dataplane import DataPlaneServer

REPOSITORY = Path(__file__).parents[2]
TOKEN, STEP = "job-token", 4
LAYOUT = layout_of_hosts(3)
A, B = HostId(0), HostId(1)
PATH = "['w']"
SHARD: Box = ((4, 8), (0, 3))
"""What B has of `w`."""
WHOLE = np.ascontiguousarray(elements(PATH, STEP)[4:8])
PIECES: dict[str, Box] = {
    "whole shard": SHARD,
    "rows of it": ((4, 6), (0, 3)),
    "columns of it": ((4, 8), (1, 3)),
}


@pytest.fixture
def arenas() -> Iterator[dict[HostId, Arena]]:
    """Each host has its part of `w`, and nobody a second copy."""
    with made_arenas(LAYOUT, 1, STEP) as made:
        yield made


@pytest.fixture
def address(arenas: dict[HostId, Arena]) -> Iterator[str]:
    """Where B serves."""
    server = DataPlaneServer(arenas[B], TOKEN, lambda: GENERATION)
    server.start()
    yield server.address
    server.close()


def damage(path: Path) -> None:
    """Flip a bit in the last element of B's shard: outside of some of the pieces."""
    flip(path, path.read_bytes().index(WHOLE.tobytes()) + WHOLE.nbytes - 1, 1)


def slot_of(arena: Arena) -> Path:
    return next(path for path in arena.slot_files() if WHOLE.tobytes() in path.read_bytes())


def transfer(piece: Box) -> Transfer:
    nbytes = 4 * int(np.prod([stop - start for start, stop in piece]))
    return Transfer(
        path=PATH, source=B, target=A, source_box=SHARD, piece=piece, target_box=piece, nbytes=nbytes
    )


def stage(address: str, piece: Box) -> Stage:
    return Stage(
        member=0,
        generation=GENERATION + 1,
        step=STEP,
        of_generation=GENERATION,
        layout=LAYOUT,
        transfers=(transfer(piece),),
        addresses={1: address},
    )


# ---- damaged where it is stored ----


def test_own_memory_is_verified_at_a_fence_and_again_when_it_is_restored(
    arenas: dict[HostId, Arena],
) -> None:
    damage(slot_of(arenas[B]))
    verified = arenas[B].verified_snapshots()
    assert [h.box for _, held in verified.snapshots for h in held if h.path == PATH] == []
    assert "do not match their checksum" in verified.rejected[0].reason
    source = arenas[B].find_shards(STEP)
    out = np.empty(WHOLE.nbytes, np.uint8)
    assert not source.read_stored(PATH, SHARD, out)
    with pytest.raises(MissingShardError):
        source.read(PATH, SHARD)
    source.close()


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
def test_pieces_of_memory_in_the_same_process_are_verified(arenas: dict[HostId, Arena], piece: Box) -> None:
    assert read_pieces(arenas[B], STEP, GENERATION, [(PATH, piece)])
    damage(slot_of(arenas[B]))
    with pytest.raises(MissingShardError):
        read_pieces(arenas[B], STEP, GENERATION, [(PATH, piece)])


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
def test_peers_memory_is_verified_before_it_is_staged(
    arenas: dict[HostId, Arena], address: str, piece: Box
) -> None:
    tasks = ArenaTasks(arenas[A], 0, TOKEN, count_writes=True)
    tasks.stage_now(stage(address, piece))
    damage(slot_of(arenas[B]))
    with pytest.raises(CorruptCopyError, match="do not match their checksum"):
        tasks.stage_now(stage(address, piece))


def test_what_was_staged_is_verified_again_when_it_is_restored(
    arenas: dict[HostId, Arena], address: str
) -> None:
    ArenaTasks(arenas[A], 0, TOKEN).stage_now(stage(address, SHARD))
    source = arenas[A].find_shards(STEP, GENERATION + 1)
    assert source.read(PATH, SHARD).tobytes() == WHOLE.tobytes()
    damage(arenas[A].directory / "stage")
    out = np.empty(WHOLE.nbytes, np.uint8)
    assert not source.read_stored(PATH, SHARD, out)
    source.close()


def test_copies_for_other_slices_are_verified_when_they_are_pulled(
    arenas: dict[HostId, Arena], address: str
) -> None:
    pull = AgentPull(TOKEN, None)
    pull.addresses = {1: address}
    copies = [BuddyCopy(PATH, SHARD, (B,))]
    into = [memoryview(bytearray(WHOLE.nbytes))]
    pull(GENERATION, STEP, copies, into, threading.Event())
    assert into[0].tobytes() == WHOLE.tobytes()
    damage(slot_of(arenas[B]))
    with pytest.raises(CorruptCopyError, match="do not match their checksum"):
        pull(GENERATION, STEP, copies, into, threading.Event())


def test_snapshot_for_the_persistent_tier_is_verified_when_it_is_pinned(arenas: dict[HostId, Arena]) -> None:
    damage(slot_of(arenas[B]))
    with pytest.raises(CorruptCopyError, match="do not match their checksum"):
        arenas[B].pin(STEP, GENERATION)


def test_digest_is_not_computed_over_damaged_bytes(arenas: dict[HostId, Arena], address: str) -> None:
    command = ComputeDigest(
        member=0,
        generation=GENERATION,
        step=STEP,
        of_generation=GENERATION,
        purpose="restored",
        layout=LAYOUT,
        transfers=(transfer(SHARD),),
        addresses={1: address},
    )
    damage(slot_of(arenas[B]))
    assert ArenaTasks(arenas[A], 0, TOKEN).digest_now(command).digest == ""


def test_page_on_verification_names_tests_that_there_are() -> None:
    tests = {path.name: path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py")}
    page = (REPOSITORY / "docs" / "verification.md").read_text()
    files, names = set(re.findall(r"`(test_\w+\.py)`", page)), set(re.findall(r"`(test_\w+)`", page))
    assert len(names) > 10
    assert files <= tests.keys()
    assert {name for name in names if not any(f"def {name}(" in text for text in tests.values())} == set()


# ---- damaged on its way ----


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
def test_bytes_damaged_on_the_way_are_fetched_again_and_never_staged(
    arenas: dict[HostId, Arena], address: str, piece: Box
) -> None:
    rows = elements(PATH, STEP)
    sent = rows[tuple(slice(*part) for part in piece)].tobytes()

    def hit(data: bytes) -> bytes:
        at = data.find(sent)
        return data if at < 0 else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    once: list[Callable[[int, int, bytes], bytes]] = [lambda n, passed, data: hit(data)]

    def first_time(number: int, passed: int, data: bytes) -> bytes:
        if once and sent in data:
            return once.pop()(number, passed, data)
        return data

    tasks = ArenaTasks(arenas[A], 0, TOKEN)
    with Proxy(address, first_time) as proxy:
        tasks.stage_now(stage(proxy.address, piece))
    assert not once
    source = arenas[A].find_shards(STEP, GENERATION + 1)
    assert source.read(PATH, piece).tobytes() == sent
    source.close()
    with (
        Proxy(address, lambda number, passed, data: hit(data)) as proxy,
        pytest.raises(CorruptCopyError, match="damaged on its way"),
    ):
        tasks.stage_now(stage(proxy.address, piece))
