"""A pinned snapshot stays as it was, however often the worker captures after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from snapshot_helpers import HOST, flip, reserve, shard_data, small_static, write_into

from reshard.errors import CorruptCopyError, InsufficientMemoryError
from snapshot import shm
from snapshot.arena import Arena
from snapshot.gc import collect
from snapshot.slot_reader import SlotReader


def holds(path: Path) -> tuple[int, list[bytes]]:
    with SlotReader(path) as reader:
        manifest = reader.read_manifest()
        assert manifest is not None
        return manifest.step, [reader.read_shard(i).tobytes() for i in range(len(manifest.checksums))]


def test_a_pinned_snapshot_outlives_the_captures_that_overwrite_its_slot(arena: Arena):
    reserve(arena)
    write_into(arena, 1)
    pinned = arena.pin(1, 1)
    assert pinned is not None
    for step in (2, 3, 4):
        write_into(arena, step)
    assert holds(pinned) == (1, shard_data(small_static(), 1))
    assert [manifest.step for manifest in arena.manifests().complete] == [4, 3]
    assert arena.pin(4, 1) == pinned
    assert holds(pinned)[0] == 4
    arena.unpin()
    arena.unpin()
    assert not pinned.exists()


def test_what_no_slot_holds_is_not_pinned(arena: Arena):
    reserve(arena)
    assert arena.pin(1, 1) is None
    write_into(arena, 1)
    assert arena.pin(2, 1) is None
    assert arena.pin(1, 2) is None
    assert not (arena.directory / "pinned").exists()


def test_a_slot_overwritten_while_it_is_copied_gives_none(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    reserve(arena)
    write_into(arena, 1)
    read_shard = SlotReader.read_shard
    steps = iter(range(2, 9))

    def slow_read(reader: SlotReader, index: int) -> object:
        data = read_shard(reader, index)
        for _ in range(2):
            write_into(arena, next(steps))
        return data

    monkeypatch.setattr(SlotReader, "read_shard", slow_read)
    assert arena.pin(1, 1) is None
    assert sorted(path.name for path in arena.directory.glob("pinned*")) == []


def test_a_damaged_snapshot_is_not_pinned_and_the_one_before_stays(arena: Arena):
    reserve(arena)
    write_into(arena, 1)
    pinned = arena.pin(1, 1)
    assert pinned is not None
    write_into(arena, 2)
    for path in arena.slot_files():
        if path.exists() and (at := path.read_bytes().find(shard_data(small_static(), 2)[0])) >= 0:
            flip(path, at)
    with pytest.raises(CorruptCopyError, match="do not match their checksum"):
        arena.pin(2, 1)
    assert holds(pinned)[0] == 1
    assert [path.name for path in arena.directory.glob("pinned*")] == ["pinned"]


def test_no_room_is_a_clean_error(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    reserve(arena)
    write_into(arena, 1)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm.os, "posix_fallocate", full)
    with pytest.raises(InsufficientMemoryError):
        arena.pin(1, 1)
    assert list(arena.directory.glob("pinned*")) == []


def test_clean_up_removes_pinned_files_of_a_dead_job(root: Path):
    arena = Arena.create("dead", HOST, root=root)
    reserve(arena)
    write_into(arena, 1)
    assert arena.pin(1, 1) is not None
    arena.close()
    collect(root)
    assert list(root.iterdir()) == []
