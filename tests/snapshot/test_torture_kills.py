"""SIGKILL of worker or agent at any point leaves a complete snapshot, older or newer and never mixed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from torture_processes import NUM_ROWS, Forker, assert_of_one_step, check_whole, slot_bytes, static
from view_helpers import SPLIT, A, capture_step, make_arena

import snapshot
from snapshot import slot_header as fmt
from snapshot.arena import Arena
from snapshot.gc import collect
from snapshot.locate import find_job
from snapshot.manifest import encode_static
from snapshot.verification import verify_job

SEED = int(os.environ.get("ELASTIC_TEST_SEED", "20"))
FEW = pytest.param(20, id="20")
MANY = pytest.param(200, id="200", marks=[pytest.mark.soak, pytest.mark.timeout(600)])


@pytest.fixture
def arena(root: Path) -> Iterator[Arena]:
    """Hold steps 1 and 2."""
    made = Arena.create("job", A, root=root)
    made.reserve(slot_bytes(), journal_record_bytes=256, journal_records=8)
    for step in (1, 2):
        capture_step(made, step, static=static())
    yield made
    made.unlink()
    assert list(root.iterdir()) == []


@pytest.fixture
def forker(root: Path) -> Iterator[Forker]:
    made = Forker(root)
    yield made
    made.close()


def kill_in_a_capture(root: Path, forker: Forker, rng: random.Random, step: int) -> int:
    """Run a worker from `step` on and kill it in a capture; return the step before the one it was writing.

    Waits for a random element of a random later step to appear in memory, so that the kill that follows
    falls into the middle of a copy, wherever that is.
    """
    half, row = divmod(rng.randrange(NUM_ROWS), NUM_ROWS // 2)
    later = step + rng.randrange(1, 40)
    views = [snapshot.open("job", root=root, step=held) for held in (step - 1, step)]
    cells = [view.shards(SPLIT)[half].elements[row, :1] for view in views]
    pid = forker.start("worker", step + 1)
    while not any(cell[0] >= later for cell in cells):
        pass
    forker.kill(pid)
    for view in views:
        view.close()
    return later - 1


@pytest.mark.parametrize("num_kills", [FEW, MANY])
def test_worker_killed_at_random_points_of_its_captures_leaves_one_whole_snapshot(
    root: Path, arena: Arena, forker: Forker, num_kills: int
) -> None:
    print(f"ELASTIC_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    step, num_torn = 2, 0
    for _ in range(num_kills):
        finished = kill_in_a_capture(root, forker, rng, step)
        num_torn += len(arena.manifests().complete) == 1
        survived = check_whole(root, at_least=finished)
        verification = verify_job(find_job("job", root=root))
        assert verification.is_sound
        assert verification.overwritten == ()
        for held in verification.snapshots:  # the older one, too, where the kill left it
            with snapshot.open("job", root=root, step=held.step) as view:
                assert_of_one_step(view)
        for next_step in (survived + 1, survived + 2):  # the next worker goes on
            capture_step(arena, next_step, static=static())
        step = survived + 2
    print(f"{num_torn} of {num_kills} kills fell into the middle of a capture")
    assert num_torn, "no kill fell into the middle of a capture"


def watched_cells(arena: Arena, rng: random.Random) -> list[npt.NDArray[np.float32]]:
    """Return one random element of `split` in each slot, over the memory that a worker writes."""
    static_part = arena.manifests().complete[0].static
    data_offset = fmt.lay_out(len(encode_static(static_part)), len(static_part.shards))[2]
    shards = [entry for entry in static_part.shards if entry.path == SPLIT]
    entry = rng.choice(shards)
    offset = data_offset + entry.offset + 4 * rng.randrange(entry.nbytes // 4)
    return [
        np.memmap(arena.directory / name, np.float32, mode="r", offset=offset, shape=(1,))
        for name in ("slot0", "slot1")
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_kills", [pytest.param(10, id="10"), MANY])
def test_training_process_killed_at_random_points_leaves_one_whole_snapshot(
    root: Path, num_kills: int
) -> None:
    """The same with JAX, donated buffers and the real capture; each process goes on from the last one."""
    print(f"ELASTIC_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    arena = Arena.create("job", A, root=root)
    arena.reserve(slot_bytes())
    forker = Forker(root, with_jax=True)
    step, num_torn = 0, 0
    for _ in range(num_kills):
        pid = forker.start("trainer", step + 1)
        while not any(manifest.step > step for manifest in arena.manifests().complete):
            assert forker.is_running(pid)
        cells = watched_cells(arena, rng)
        later = max(cell[0] for cell in cells) + rng.randrange(2, 200)
        while not any(cell[0] >= later for cell in cells):
            pass
        forker.kill(pid)
        num_torn += len(arena.manifests().complete) == 1
        step = check_whole(root, at_least=int(later) - 1)
        assert verify_job(find_job("job", root=root)).is_sound
    print(f"{num_torn} of {num_kills} kills fell into the middle of a capture")
    forker.close()
    arena.unlink()


@pytest.mark.parametrize("num_kills", [FEW, MANY])
def test_agent_killed_at_random_points_leaves_the_newest_snapshot_and_a_usable_arena(
    root: Path, arena: Arena, forker: Forker, num_kills: int
) -> None:
    print(f"ELASTIC_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    num_lines = forker.run("agent", 1)
    step, num_killed = 2, 0
    for round_index in range(num_kills):
        num_killed += forker.run_and_die("agent", rng.randint(1, num_lines), round_index)
        assert check_whole(root, at_least=step) == step
        for _ in range(2):  # the worker trains on, without an agent
            step += 1
            capture_step(arena, step, static=static())
            assert check_whole(root, at_least=step) == step
    assert num_killed > num_kills // 2
    forker.run("agent", num_kills)  # another agent takes over
    with snapshot.open("job", root=root) as view:
        assert view.step == step
    # What a killed agent was making is made anew under the same name, so that it does not pile up.
    unfinished = [path.name for path in arena.directory.iterdir() if path.suffix in (".new", ".part")]
    assert {name.split(".")[0] for name in unfinished} <= {"slot0", "slot1", "journal", "stage"}


@pytest.mark.parametrize("num_kills", [FEW, MANY])
def test_clean_up_killed_at_random_points_spares_the_live_and_is_finished_by_the_next(
    root: Path, arena: Arena, forker: Forker, num_kills: int
) -> None:
    print(f"ELASTIC_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    make_arena(root, A, 1, job_id="dead").close()
    num_lines = forker.run("collector", 0)
    assert not (root / "elastic-dead").exists()
    num_empty = 0
    for _ in range(num_kills):
        make_arena(root, A, 1, job_id="dead").close()
        forker.run_and_die("collector", rng.randint(1, num_lines), 0)
        assert check_whole(root, at_least=2) == 2
        collect(root)
        left = root / "elastic-dead"
        if left.exists():  # killed between its last two calls
            num_empty += 1
            assert list(left.iterdir()) == []
            os.utime(left, (0, 0))
            collect(root)
        assert [path.name for path in root.iterdir()] == ["elastic-job"]
    print(f"{num_empty} of {num_kills} kills left an empty directory for an hour")


def test_capture_of_one_step_is_recognised_when_mixed_with_another(root: Path, arena: Arena) -> None:
    """The check itself can fail: a slot whose bytes are half of another step is called mixed."""
    with snapshot.open("job", root=root) as view:
        writer = arena.slot_for_write(slot_bytes(), 3)
        writer.begin()
        half = np.full(NUM_ROWS * 8, 3, np.float32).tobytes()
        checksums = [snapshot.checksum(shard) for shard in writer.shard_views]
        writer.shard_views[0][:] = half
        checksums[0] = snapshot.checksum(half)
        writer.commit(step=3, generation=1, position=3, checksums=checksums)
        view.refresh()
        with pytest.raises(AssertionError, match="of step 3 is mixed"):
            assert_of_one_step(view)
