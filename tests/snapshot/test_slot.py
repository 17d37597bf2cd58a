"""A slot gives back exactly what was committed, or says why it cannot."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshot_helpers import HOST, flip, make_slot, shard_data, small_static, write

from reshard.errors import CorruptCopyError, UsageError
from reshard.layout import ArrayLayout, Layout, MeshLayout
from snapshot.copying import BLOCK_BYTES
from snapshot.manifest import make_static
from snapshot.slot import SlotWriter, allocate_slot, required_bytes, write_slot
from snapshot.slot_reader import SlotReader


def read_all(path: Path) -> list[bytes] | None:
    """Return the shards of a slot, None when it holds nothing; raises what the reader raises."""
    with SlotReader(path) as reader:
        manifest = reader.read_manifest()
        if manifest is None:
            return None
        return [reader.read_shard(index).tobytes() for index in range(len(manifest.static.shards))]


def test_slot_gives_back_the_committed_shards_and_manifest(root: Path) -> None:
    data = make_slot(root / "slot0", step=7)
    assert read_all(root / "slot0") == data
    with SlotReader(root / "slot0") as reader:
        manifest = reader.read_manifest()
    assert manifest is not None
    assert (manifest.step, manifest.generation, manifest.position) == (7, 1, 70)
    assert manifest.static == small_static()
    assert [holding.tier for holding in manifest.holdings()] == ["shm"] * 3
    assert manifest.holdings()[0].checksum == manifest.checksums[0]


def test_slot_file_is_readable_by_its_owner_only_and_fully_allocated(root: Path) -> None:
    make_slot(root / "slot0")
    info = (root / "slot0").stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_blocks * 512 >= info.st_size


def test_slot_is_empty_before_the_first_commit_and_while_written(root: Path) -> None:
    allocate_slot(root / "slot0", required_bytes(small_static()))
    assert read_all(root / "slot0") is None
    writer = SlotWriter(root / "slot0")
    write(writer, step=1)
    assert read_all(root / "slot0") is not None
    writer.begin()
    assert read_all(root / "slot0") is None
    writer.close()


def test_every_flipped_byte_of_a_slot_is_refused_or_harmless(root: Path) -> None:
    path = root / "slot0"
    data = make_slot(path)
    num_refused = 0
    for offset in range(path.stat().st_size):
        flip(path, offset)
        try:
            content = read_all(path)
        except CorruptCopyError:
            content = None
        assert content in (None, data), f"byte {offset} went unnoticed"
        num_refused += content is None
        flip(path, offset)
    static_bytes = required_bytes(small_static())
    assert read_all(path) == data
    assert num_refused > 4096 < static_bytes  # at least the whole header page


def test_flipped_shard_byte_names_array_box_and_step(root: Path) -> None:
    data = make_slot(root / "slot0")
    offset = (root / "slot0").read_bytes().index(data[2])
    flip(root / "slot0", offset, mask=1)
    with pytest.raises(CorruptCopyError, match=r"step 7: bytes of 'w' \[2:4, 0:3\] do not match") as caught:
        read_all(root / "slot0")
    assert caught.value.path == "w"


def test_truncated_slot_is_refused_at_every_length(root: Path) -> None:
    path = root / "slot0"
    make_slot(path)
    whole = path.read_bytes()
    for length in (*range(0, 4097, 97), *range(4096, len(whole) - 4000, 61)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptCopyError, match=r"truncated|bad header"):
            read_all(path)


def test_foreign_file_is_refused_with_its_first_bytes(root: Path) -> None:
    (root / "slot0").write_bytes(b"#!/bin/sh\n" + bytes(5000))
    with pytest.raises(CorruptCopyError, match=r"foreign file: it starts with b'#!/bin/s'"):
        read_all(root / "slot0")


def test_future_format_version_is_refused_by_number(root: Path) -> None:
    make_slot(root / "slot0")
    flip(root / "slot0", 8, mask=1 ^ 9)
    with pytest.raises(CorruptCopyError, match="future version: format 9"):
        read_all(root / "slot0")


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_reader_neither_hangs_nor_follows_what_is_not_a_file(root: Path, kind: str) -> None:
    path = root / "slot0"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        make_slot(root / "other")
        path.symlink_to(root / "other")
    with pytest.raises((CorruptCopyError, OSError)) as caught:
        read_all(path)
    if kind == "link":
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == errno.ELOOP


@settings(
    max_examples=settings().max_examples * 3, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(garbage=st.binary(max_size=9000), keep=st.integers(0, 200))
def test_reader_survives_any_bytes_after_a_valid_prefix(root: Path, garbage: bytes, keep: int) -> None:
    make_slot(root / "slot0")
    (root / "slot0").write_bytes((root / "slot0").read_bytes()[:keep] + garbage)
    try:
        read_all(root / "slot0")
    except CorruptCopyError as error:
        assert str(root / "slot0") in error.message  # noqa: PT017


def test_reader_notices_a_slot_overwritten_after_its_manifest_was_read(root: Path) -> None:
    make_slot(root / "slot0", step=7)
    writer = SlotWriter(root / "slot0")
    with SlotReader(root / "slot0") as reader:
        reader.read_manifest()
        write(writer, step=8)
        with pytest.raises(CorruptCopyError, match="overwritten"):
            reader.read_shard(0, verify=False)
    writer.close()


def test_new_static_manifest_in_a_used_slot_replaces_the_old_one(root: Path) -> None:
    make_slot(root / "slot0", step=7)
    writer = SlotWriter(root / "slot0")  # another process's writer: prepares anew
    data = write(writer, step=9)
    assert read_all(root / "slot0") == data
    writer.close()


def test_prepare_refuses_shards_that_do_not_fit(root: Path) -> None:
    allocate_slot(root / "slot0", 1)
    writer = SlotWriter(root / "slot0")
    with pytest.raises(UsageError, match="are needed"):
        write(writer, step=1)
    writer.close()


def test_write_slot_leaves_nothing_behind_when_a_shard_has_the_wrong_size(root: Path) -> None:
    static = small_static()
    data = shard_data(static, 1)
    with pytest.raises(UsageError, match="its box needs 24"):
        write_slot(root / "stage", static, [*data[:2], b"x"], step=1, generation=1, position=0)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 7])
def test_shard_is_checked_whole_in_the_memory_of_one_block(root: Path, nbytes: int) -> None:
    path = root / "slot0"
    array = ArrayLayout(path="w", shape=(nbytes,), dtype="uint8", itemsize=1)
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(1,), hosts=(HOST,))
    static = make_static(HOST, Layout(mesh=mesh, arrays=(array,)), [("w", ((0, nbytes),))])
    data = np.random.default_rng(0).bytes(nbytes)
    write_slot(path, static, [data], step=1, generation=1, position=0)
    with SlotReader(path) as reader:
        reader.read_manifest()
        reader.check_shard(0)
        assert reader.read_shard(0).tobytes() == data
        if nbytes:
            offset, last = reader.shard_location(0)[1], nbytes - 1
            for damaged in {0, nbytes // 2, last}:
                flip(path, offset + damaged)
                with pytest.raises(CorruptCopyError, match="do not match their checksum"):
                    reader.check_shard(0)
                flip(path, offset + damaged)
            reader.check_shard(0)
