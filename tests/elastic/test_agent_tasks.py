"""What an agent does with its arena and its peers': stage and digest over the real data plane."""

from __future__ import annotations

import contextlib
import queue
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.agent_tasks import ArenaTasks
from elastic.choose import plan_whole
from elastic.events import ComputeDigest, DigestDone, Stage, Staged
from reshard.boxes import Box
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.transfer import Transfer
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.dataplane import DataPlaneServer
from snapshot.digest import state_digest
from snapshot.manifest import encode_static, make_static
from snapshot.slot import required_bytes

TOKEN, STEP, GENERATION = "job-token", 7, 3
HOSTS = (HostId(0), HostId(1))
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
LAYOUT = Layout(
    mesh=MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=HOSTS),
    arrays=(ArrayLayout(path="w", shape=(4, 3), dtype="float32", itemsize=4, spec=(("data",), ())),),
    elastic_axis="data",
)
BOXES = (((0, 2), (0, 3)), ((2, 4), (0, 3)))


@pytest.fixture
def arenas() -> Iterator[tuple[Arena, Arena]]:
    """Two hosts, each with its half of the rows at `STEP`."""
    with hosts((HOSTS[0], BOXES[0]), (HOSTS[1], BOXES[1])) as made:
        yield made[0], made[1]


@pytest.fixture
def third() -> Iterator[Arena]:
    """A host with the same rows as the second."""
    with hosts((HostId(2), BOXES[1])) as made:
        yield made[0]


@contextlib.contextmanager
def hosts(*holders: tuple[HostId, Box]) -> Iterator[list[Arena]]:
    root = Path(tempfile.mkdtemp(prefix="elastic-slices-test-", dir="/dev/shm"))
    made = [Arena.create("job", host, root=root) for host, _ in holders]
    for arena, (host, box) in zip(made, holders, strict=True):
        static = make_static(host, LAYOUT, [("w", box)])
        arena.reserve(required_bytes(static))
        slot = arena.slot_for_write(required_bytes(static), STEP)
        slot.prepare(static, encode_static(static))
        slot.begin()
        slot.shard_views[0][:] = ROWS[slice(*box[0])].tobytes()
        slot.commit(step=STEP, generation=1, position=0, checksums=[checksum(slot.shard_views[0])])
    try:
        yield made
    finally:
        for arena in made:
            arena.close()
        shutil.rmtree(root)


@pytest.fixture
def address(arenas: tuple[Arena, Arena]) -> Iterator[str]:
    """Where the second host serves its shards."""
    with serving(arenas[1]) as server:
        yield server.address


@contextlib.contextmanager
def serving(arena: Arena) -> Iterator[DataPlaneServer]:
    server = DataPlaneServer(arena, TOKEN, lambda: GENERATION)
    server.start()
    try:
        yield server
    finally:
        server.close()


def transfers() -> tuple[Layout, tuple[Transfer, ...]]:
    """All of the state to the first host."""
    holdings = [
        Holding(path="w", box=box, step=STEP, host=host, tier="shm", checksum=0)
        for host, box in zip(HOSTS, BOXES, strict=True)
    ]
    layout, plan = plan_whole(LAYOUT, holdings, STEP, HOSTS[0])
    return layout, plan.transfers


def stage(addresses: dict[int, str]) -> Stage:
    _, planned = transfers()
    return Stage(
        member=0,
        generation=GENERATION,
        step=STEP,
        layout=LAYOUT,
        transfers=tuple(transfer for transfer in planned if not transfer.is_local),
        of_generation=1,
        addresses=addresses,
    )


def told(tasks: ArenaTasks, command: Stage | ComputeDigest) -> Any:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    if isinstance(command, Stage):
        tasks.stage(command, lambda: GENERATION, answers.put)
    else:
        tasks.compute_digest(command, answers.put)
    return answers.get(timeout=10)


def test_staged_pieces_of_a_peer_can_be_read_and_count_as_its_bytes(
    arenas: tuple[Arena, Arena], address: str
) -> None:
    tasks = ArenaTasks(arenas[0], 0, TOKEN)
    assert told(tasks, stage({1: address})) == Staged(member=0, generation=GENERATION)
    source = arenas[0].find_shards(STEP, GENERATION)
    assert source.read("w", BOXES[1]).tobytes() == ROWS[2:].tobytes()
    source.close()
    assert tasks.bytes_from({"shm": ROWS.nbytes}) == {"shm": ROWS.nbytes // 2, "peer": ROWS.nbytes // 2}


def test_source_that_is_away_is_replaced_by_another_that_holds_the_shard(
    arenas: tuple[Arena, Arena], third: Arena, address: str
) -> None:
    with serving(third) as other:
        command = replace(stage({2: other.address}), alternates=((2,),))
        tasks = ArenaTasks(arenas[0], 0, TOKEN)
        assert told(tasks, command) == Staged(member=0, generation=GENERATION)
    source = arenas[0].find_shards(STEP, GENERATION)
    assert source.read("w", BOXES[1]).tobytes() == ROWS[2:].tobytes()
    source.close()


def test_what_was_staged_stays_when_fetching_fails(arenas: tuple[Arena, Arena], address: str) -> None:
    tasks = ArenaTasks(arenas[0], 0, TOKEN)
    told(tasks, stage({1: address}))
    answer = told(tasks, replace(stage({1: address}), step=STEP + 1))
    assert "step 8 is not here" in answer.error
    assert [m.step for m in arenas[0].manifests().complete if m.generation == GENERATION] == [STEP]
    assert not (arenas[0].directory / "stage.part").exists()


def test_digest_is_that_of_the_whole_state(arenas: tuple[Arena, Arena], address: str) -> None:
    layout, planned = transfers()
    command = ComputeDigest(
        member=0,
        generation=GENERATION,
        step=STEP,
        of_generation=1,
        purpose="captured",
        layout=layout,
        transfers=planned,
        addresses={1: address},
    )
    answer = told(ArenaTasks(arenas[0], 0, TOKEN), command)
    assert isinstance(answer, DigestDone)
    assert answer.digest == state_digest([("w", "float32", (4, 3), ROWS.reshape(-1).view(np.uint8))])


def fetched(first: int, last: int) -> Transfer:
    """Rows of the second host on their way to the first, which has the others."""
    return Transfer(
        path="w",
        source=HOSTS[1],
        target=HOSTS[0],
        source_box=BOXES[1],
        piece=((first, last), (0, 3)),
        target_box=((0, 4), (0, 3)),
        nbytes=12 * (last - first),
    )


@pytest.mark.parametrize(
    ("doctored", "message"),
    [
        ([fetched(2, 3)], r"written 0 to 1 times, \(3, 0\) 0 times"),
        ([fetched(2, 4), fetched(3, 4)], r"written 0 to 2 times, \(3, 0\) 2 times"),
        ([fetched(2, 4), replace(fetched(2, 4), target_box=((2, 5), (0, 3)))], r"\(4, 0\) 0 times"),
        (
            [replace(fetched(2, 3), source_box=BOXES[0], piece=((1, 2), (0, 3))), fetched(2, 4)],
            "no surviving",
        ),
    ],
    ids=["gap", "overlap", "wrong target box", "wrong source box"],
)
def test_doctored_plan_is_found_before_what_it_staged_counts(
    arenas: tuple[Arena, Arena], address: str, doctored: list[Transfer], message: str
) -> None:
    tasks = ArenaTasks(arenas[0], 0, TOKEN, count_writes=True)
    sound = stage({1: address})
    assert told(tasks, sound) == Staged(member=0, generation=GENERATION)
    answer = told(tasks, replace(sound, transfers=tuple(doctored)))
    assert re.search(message, answer.error), answer.error
    source = arenas[0].find_shards(STEP, GENERATION)
    assert source.boxes("w") == (BOXES[1],)
    source.close()


def digest_command(address: str, transfers: tuple[Transfer, ...]) -> ComputeDigest:
    return ComputeDigest(
        member=0,
        generation=GENERATION,
        step=STEP,
        of_generation=1,
        purpose="captured",
        layout=whole_layout(),
        transfers=transfers,
        addresses={1: address},
    )


def whole_layout() -> Layout:
    return transfers()[0]


@pytest.mark.parametrize("keep", [slice(0, 1), slice(1, 2)], ids=["the peer's part", "its own part"])
def test_digest_of_a_state_that_is_not_whole_equals_no_other(
    arenas: tuple[Arena, Arena], address: str, keep: slice
) -> None:
    answer = told(ArenaTasks(arenas[0], 0, TOKEN), digest_command(address, transfers()[1][keep]))
    assert answer.digest.startswith("captured state: the plan writes 6 of the 12 elements of 'w'")


def test_digest_counts_the_writes_to_each_element_when_told_so(
    arenas: tuple[Arena, Arena], address: str
) -> None:
    local, remote = transfers()[1]
    overlapping = (
        local,
        replace(remote, piece=((2, 3), (0, 3)), nbytes=12),
        replace(remote, piece=((2, 3), (0, 3)), nbytes=12),
    )
    command = digest_command(address, overlapping)
    answer = told(ArenaTasks(arenas[0], 0, TOKEN, count_writes=True), command)
    assert "0 to 2 times" in answer.digest


def test_peer_whose_agent_is_away_is_told_as_an_error_and_not_waited_for(
    arenas: tuple[Arena, Arena],
) -> None:
    answer = told(ArenaTasks(arenas[0], 0, TOKEN), stage({}))
    assert isinstance(answer, Staged)
    assert "w" in answer.error
