"""An arena always keeps a complete snapshot, and says clearly when there is no room."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from snapshot_helpers import (
    HOST,
    flip,
    make_slot,
    reserve,
    shard_data,
    small_layout,
    small_static,
    start_python,
    steps,
    write_into,
)

from reshard.errors import InsufficientMemoryError, MissingShardError, UsageError
from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.journal import JournalRecord
from snapshot.shm import available_bytes
from snapshot.slot import required_bytes


@pytest.fixture
def small_tmpfs(root: Path) -> Iterator[Path]:
    mount_point = root / "small"
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def test_captures_alternate_between_slots_and_list_newest_first(arena: Arena) -> None:
    reserve(arena)
    for step in range(1, 6):
        write_into(arena, step)
    contents = arena.manifests()
    assert steps(contents.complete) == [5, 4]
    assert contents.rejected == ()


def test_directories_and_files_belong_to_their_owner_only(arena: Arena) -> None:
    reserve(arena)
    for path in (arena.directory, arena.directory.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in arena.directory.iterdir()} == {0o600}


def test_snapshots_of_an_abandoned_way_are_overwritten_first(arena: Arena) -> None:
    reserve(arena)
    write_into(arena, 59, generation=1)
    write_into(arena, 60, generation=1)
    write_into(arena, 59, generation=2)  # restored from 59: the restored state is captured again
    kept = [(manifest.generation, manifest.step) for manifest in arena.manifests().complete]
    assert kept == [(2, 59), (1, 59)]


def test_restored_state_captured_again_never_touches_the_copy_it_came_from(arena: Arena) -> None:
    reserve(arena)
    write_into(arena, 58, generation=1)
    write_into(arena, 59, generation=1)
    write_into(arena, 59, generation=2)
    kept = [(manifest.generation, manifest.step) for manifest in arena.manifests().complete]
    assert kept == [(2, 59), (1, 59)]


def test_discard_newer_than_keeps_the_restored_step_only(arena: Arena) -> None:
    reserve(arena)
    write_into(arena, 59)
    write_into(arena, 60)
    data = shard_data(small_static(), 61)[:1]
    arena.write_stage(small_layout(), [("b", ((0, 5),), data[0])], step=61, generation=1, position=0)
    arena.discard_newer_than(59)
    assert steps(arena.manifests().complete) == [59]
    assert not (arena.directory / "stage").exists()


def test_damaged_copy_is_reported_with_its_reason_and_the_good_one_kept(arena: Arena) -> None:
    reserve(arena)
    write_into(arena, 1)
    write_into(arena, 2)
    flip(arena.directory / "slot1", 4100)
    contents = arena.manifests()
    assert steps(contents.complete) == [1]
    assert [(copy.name, "bad static manifest" in copy.reason) for copy in contents.rejected] == [
        ("slot1", True)
    ]


def test_verified_holdings_leave_out_a_shard_with_wrong_bytes(arena: Arena) -> None:
    reserve(arena)
    data = write_into(arena, 3)
    path = arena.directory / "slot0"
    flip(path, path.read_bytes().index(data[2]))
    found = arena.verified_holdings()
    assert [holding.path for holding in found.holdings] == ["b", "empty"]
    assert ["'w'" in copy.reason for copy in found.rejected] == [True]
    source = arena.find_shards(3)
    assert source.read("b", ((0, 5),)).tobytes() == data[0]
    with pytest.raises(MissingShardError, match=r"'w', box \[2:4, 0:3\] at step 3"):
        source.read("w", ((2, 4), (0, 3)))
    assert len(source.rejected) == 1
    source.close()


def test_source_falls_back_to_the_staged_copy_of_a_damaged_shard(arena: Arena) -> None:
    reserve(arena)
    data = write_into(arena, 3)
    arena.write_stage(small_layout(), [("w", ((2, 4), (0, 3)), data[2])], step=3, generation=2, position=30)
    path = arena.directory / "slot0"
    flip(path, path.read_bytes().index(data[2]))
    source = arena.find_shards(3)
    assert source.read("w", ((2, 4), (0, 3))).tobytes() == data[2]
    source.close()


def test_source_puts_a_box_together_from_slot_and_staged_pieces(arena: Arena) -> None:
    reserve(arena)
    data = write_into(arena, 3)
    other = bytes(range(24))
    arena.write_stage(small_layout(), [("w", ((0, 2), (0, 3)), other)], step=3, generation=2, position=30)
    source = arena.find_shards(3)
    assert source.read("w", ((0, 4), (0, 3))).tobytes() == other + data[2]
    assert source.read("w", ((1, 3), (0, 3))).tobytes() == other[12:] + data[2][:12]
    assert source.read("empty", ((0, 0), (0, 3))).nbytes == 0
    source.close()
    arena.drop_stage()
    source = arena.find_shards(3)
    with pytest.raises(MissingShardError, match=r"\[0:2, 0:3\]"):
        source.read("w", ((0, 4), (0, 3)))
    source.close()


def test_slots_grow_in_place_and_keep_what_they_hold(arena: Arena) -> None:
    reserve(arena)
    write_into(arena, 1)
    write_into(arena, 2)
    files = [path.stat().st_ino for path in arena.slot_files()[:2]]
    arena.reserve(1 << 20)
    assert [path.stat().st_ino for path in arena.slot_files()[:2]] == files
    assert steps(arena.manifests().complete) == [2, 1]
    assert {holding.step for holding in arena.verified_holdings().holdings} == {1, 2}
    assert arena.slot_for_write(1 << 20, 3).capacity_bytes == 1 << 20
    write_into(arena, 3)
    assert steps(arena.manifests().complete) == [3, 2]


@pytest.mark.parametrize("size", [None, 0, 100])
def test_slot_that_was_removed_or_cut_short_is_made_anew_by_the_next_captures(
    arena: Arena, size: int | None
) -> None:
    reserve(arena)
    write_into(arena, 1)
    write_into(arena, 2)
    path = arena.slot_files()[0]
    path.unlink()
    if size is not None:
        path.write_bytes(bytes(size))
    for step in (3, 4):
        write_into(arena, step)
    assert steps(arena.manifests().complete) == [4, 3]
    assert {holding.step for holding in arena.verified_holdings().holdings} == {3, 4}


def test_slot_that_something_damaged_is_whole_again_after_the_next_capture(arena: Arena) -> None:
    reserve(arena)
    for step in (1, 2):
        write_into(arena, step)
    for offset in (
        0,
        40,
        80,
        4096,
    ):  # magic, changing fields, fixed ones, manifest
        with arena.slot_files()[0].open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff" * 8)
        for step in (3, 4):
            write_into(arena, step)
        assert steps(arena.manifests().complete) == [4, 3]


def test_reserve_again_touches_nothing_that_is_large_enough(arena: Arena) -> None:
    reserve(arena)
    write_into(arena, 1)
    write_into(arena, 2)
    arena.journal().append(JournalRecord(step=1, generation=1, position=4, sample_ids=(1, 2, 3)))
    reserve(arena)
    assert steps(arena.manifests().complete) == [2, 1]
    reader = arena.journal_reader()
    assert [record.sample_ids for record in reader.records()] == [(1, 2, 3)]
    reader.close()


def test_arena_is_adopted_with_its_content_after_its_maker_is_gone(root: Path) -> None:
    first = Arena.create("job", HOST, root=root)
    reserve(first)
    write_into(first, 4)
    first.close()
    second = Arena.attach("job", HOST, root=root)
    assert steps(second.manifests().complete) == [4]
    second.unlink()
    assert list(root.iterdir()) == []


def test_writing_before_reserve_says_what_to_do(arena: Arena) -> None:
    with pytest.raises(UsageError, match="Call reserve first"):
        arena.slot_for_write(100, 1)
    with pytest.raises(UsageError, match="Reserve one first"):
        arena.journal()


def test_attach_without_an_arena_says_so(root: Path) -> None:
    with pytest.raises(UsageError, match=r"no arena at .*s1h0"):
        Arena.attach("job", HOST, root=root)


@pytest.mark.parametrize("job_id", ["", "../x", "a/b", ".hidden", "x" * 101])
def test_job_id_that_is_not_a_plain_name_is_refused(root: Path, job_id: str) -> None:
    with pytest.raises(UsageError, match="not a job id"):
        Arena.create(job_id, HOST, root=root)


def test_missing_root_is_named(root: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        Arena.create("job", HOST, root=root / "nowhere")


def test_memory_that_is_too_small_says_how_much_is_needed(small_tmpfs: Path) -> None:
    arena = Arena.create("job", HOST, root=small_tmpfs)
    with pytest.raises(InsufficientMemoryError) as caught:
        arena.reserve(800_000)
    assert caught.value.needed_bytes == 2 * 802_816
    assert caught.value.available_bytes == available_bytes(small_tmpfs) <= 1 << 20
    assert str(arena.directory) in str(caught.value)
    assert sorted(os.listdir(arena.directory)) == ["lock"]
    arena.close()


def test_memory_that_runs_out_under_way_is_an_error_and_not_a_sigbus(small_tmpfs: Path) -> None:
    arena = Arena.create("job", HOST, root=small_tmpfs)
    reserve(arena)
    write_into(arena, 1)
    write_into(arena, 2)
    with pytest.raises(InsufficientMemoryError):
        arena.slot_for_write(2 << 20, 3)
    assert steps(arena.manifests().complete) == [2, 1]
    big = small_layout().arrays[0]
    with pytest.raises(InsufficientMemoryError):
        arena.write_stage(
            small_layout().__class__(
                mesh=small_layout().mesh,
                arrays=(big.__class__(path="big", shape=(2 << 20,), dtype="int8", itemsize=1, spec=((),)),),
            ),
            [("big", ((0, 2 << 20),), bytes(2 << 20))],
            step=3,
            generation=1,
            position=0,
        )
    assert sorted(path.name for path in arena.directory.iterdir() if path.name.startswith("stage")) == []
    arena.close()


def test_agent_reads_whole_snapshots_while_a_worker_overwrites_them(root: Path) -> None:
    arena = Arena.create("job", HOST, root=root)
    reserve(arena)
    code = """
import sys
from pathlib import Path
from snapshot.arena import Arena
from snapshot_helpers import HOST, write_into
arena = Arena.attach("job", HOST, root=Path(sys.argv[1]))
write_into(arena, 1)
print("ready", flush=True)
for step in range(2, 1500):
    write_into(arena, step)
"""
    worker = start_python(code, root)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    num_checked = 0
    while worker.poll() is None:
        for holding in arena.verified_holdings().holdings:
            source = arena.find_shards(holding.step)
            index = [entry.path for entry in small_static().shards].index(holding.path)
            try:
                data = source.read(holding.path, holding.box).tobytes()
            except MissingShardError:
                continue  # overwritten meanwhile: noticed
            finally:
                source.close()
            assert data == shard_data(small_static(), holding.step)[index]
            num_checked += 1
    assert worker.wait() == 0
    assert num_checked > 0
    assert worker.stdin is not None
    worker.stdin.close()
    worker.stdout.close()
    arena.unlink()


def test_writer_notices_that_its_slot_was_made_anew(arena: Arena, root: Path) -> None:
    reserve(arena)
    write_into(arena, 1)
    other = Arena.attach("job", HOST, root=root)
    other.reserve(1 << 20)
    write_into(arena, 2)
    assert steps(other.manifests().complete) == [2, 1]
    other.close()


def test_two_hosts_of_one_job_have_separate_arenas(root: Path) -> None:
    arenas = [Arena.create("job", HostId(index), root=root) for index in (0, 1)]
    reserve(arenas[0])
    write_into(arenas[0], 1)
    assert arenas[1].manifests().complete == ()
    arenas[0].unlink()
    assert (root / "elastic-job").exists()
    arenas[1].unlink()
    assert list(root.iterdir()) == []


def test_slot_size_reserved_is_the_size_required(arena: Arena) -> None:
    arena.reserve(required_bytes(small_static()))
    make_slot(arena.directory / "slot0", step=1)
    assert steps(arena.manifests().complete) == [1]
