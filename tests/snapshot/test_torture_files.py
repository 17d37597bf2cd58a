"""Whatever lies under a slot's name, it is refused with a reason, and the older or the other copy is used."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from view_helpers import SPLIT, WHOLE, A, B, capture_step, make_arena, static_of

import snapshot
from reshard.errors import InsufficientMemoryError, MissingShardError, RetryLaterError, UsageError
from snapshot import slot_header as fmt
from snapshot.arena import Arena
from snapshot.locate import find_job
from snapshot.slot import required_bytes
from snapshot.verification import verify_job

SEED = 20_26
NUM_ROWS = 4096  # 256 KB and 8 KB of shards


@pytest.fixture
def arena(root: Path) -> Iterator[Arena]:
    """Hold steps 1 and 2 of the whole state: slot0 the older, slot1 the newer."""
    made = Arena.create("job", A, root=root)
    static = static_of(A, num_rows=NUM_ROWS, both_halves=True)
    made.reserve(required_bytes(static))
    for step in (1, 2):
        capture_step(made, step, static=static)
    yield made
    made.close()


def shown_step(root: Path) -> int:
    """Return the step that a reader is given now, after checking that its content is that step's."""
    with snapshot.open("job", root=root) as view:
        try:
            copies = view.copies()
        except MissingShardError:
            # A damaged shard without another copy: named, so that the reader takes the older step.
            with snapshot.open("job", root=root, step=1) as older:
                copies = older.copies()
                return check_content(copies, older.step)
        return check_content(copies, view.step)


def check_content(copies: dict[str, object], step: int) -> int:
    for path in (SPLIT, WHOLE):
        assert (copies[path] == step).all(), path  # type: ignore[attr-defined]
    return step


def test_flipped_bytes_of_a_large_slot_are_refused_or_harmless_and_the_older_step_is_used(
    root: Path, arena: Arena
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    path = arena.directory / "slot1"
    size = path.stat().st_size
    header = [*range(128), *rng.sample(range(128, 4096), 20)]  # the rest of the page is zeros, but covered
    num_older = 0
    with path.open("r+b", buffering=0) as file:
        for offset in header + rng.sample(range(4096, size), 120):
            mask = 1 << rng.randrange(8)
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ mask]), offset)
            step = shown_step(root)
            verification = verify_job(find_job("job", root=root))
            is_noticed = bool(verification.damages) or verification.snapshots[0].step == 1
            assert (step == 1) == is_noticed, f"byte {offset} ^ {mask}"
            num_older += step == 1
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert shown_step(root) == 2
    assert num_older >= len(header)  # every bit of the header page counts, and most of the rest


def test_slot_truncated_at_any_boundary_is_refused_and_the_older_step_is_used(
    root: Path, arena: Arena
) -> None:
    path = arena.directory / "slot1"
    whole = path.read_bytes()
    header = fmt.unpack_header(whole[:4096], len(whole))
    ends = (
        0,
        8,
        16,
        24,
        32,
        120,
        fmt.HEADER_BYTES,
        header.table_offset,
        header.data_offset,
        header.end_offset,
    )
    lengths = sorted({min(max(0, end + nudge), len(whole)) for end in ends for nudge in (-1, 0, 1)})
    for length in lengths:
        path.write_bytes(whole[:length])
        is_whole = length >= header.end_offset
        contents = arena.manifests()
        assert [manifest.step for manifest in contents.complete] == ([2, 1] if is_whole else [1])
        assert all("truncated" in copy.reason for copy in contents.rejected), contents.rejected
        assert len(contents.rejected) == (not is_whole)
        assert shown_step(root) == (2 if is_whole else 1)


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, 0o140600)


def put_link_to_the_other_slot(path: Path) -> None:
    path.unlink()
    path.symlink_to("slot0")


def put_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def put_future_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 99))


def put_huge_counts(path: Path) -> None:
    """A page whose checksum is right for counts that no file could have."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<2Q", data, 88, 4096, 2**60)
    checksum = fmt.header_checksum(memoryview(data)[:16], memoryview(data)[32:4096], b"")
    struct.pack_into("<Q", data, 24, checksum)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda path: path.write_bytes(b""), "truncated: 0 bytes"),
        (lambda path: path.write_bytes(b"\x7fELF" * 5000), "foreign file: it starts with"),
        (lambda path: path.write_bytes(bytes(1 << 20)), "foreign file"),
        (put_future_version, "future version: format 99"),
        (put_huge_counts, "bad header|truncated"),
        (put_fifo, "not a regular file"),
        (put_directory, "not a regular file"),
        (put_socket, "No such device or address"),
        (put_link_to_the_other_slot, os.strerror(errno.ELOOP)),
        (put_device, os.strerror(errno.ELOOP)),
    ],
    ids=["empty", "foreign", "zeros", "future", "counts", "fifo", "directory", "socket", "link", "device"],
)
def test_what_is_no_slot_is_refused_with_its_reason_and_the_older_step_used(
    root: Path, arena: Arena, put: Callable[[Path], None], reason: str
) -> None:
    put(arena.directory / "slot1")
    contents = arena.manifests()
    assert [manifest.step for manifest in contents.complete] == [1]
    (rejected,) = contents.rejected
    assert rejected.name == "slot1"
    assert any(part in rejected.reason for part in reason.split("|")), rejected.reason
    assert {holding.step for holding in arena.verified_holdings().holdings} == {1}
    assert shown_step(root) == 1
    (damage,) = verify_job(find_job("job", root=root)).damages
    assert (damage.slot, damage.reason) == ("slot1", rejected.reason)


@pytest.mark.parametrize("put", [put_fifo, put_directory, lambda path: path.write_bytes(b"")])
def test_agent_that_reserves_over_it_makes_the_slot_anew_or_says_why_not(
    root: Path, arena: Arena, put: Callable[[Path], None]
) -> None:
    put(arena.directory / "slot1")
    static = static_of(A, num_rows=NUM_ROWS, both_halves=True)
    try:
        arena.reserve(required_bytes(static))
    except UsageError as error:
        assert put is put_directory
        assert "slot1 cannot be used" in str(error)  # noqa: PT017
        assert sorted(os.listdir(arena.directory)) == ["lock", "slot0", "slot1"]
        return
    capture_step(arena, 3, static=static)
    assert shown_step(root) == 3


def test_copy_on_another_host_is_used_where_one_host_is_damaged(root: Path) -> None:
    arenas = make_arena(root, A), make_arena(root, B)
    for arena in arenas:
        capture_step(arena, 5, static=static_of(arena.host, both_halves=True))
    rng = random.Random(SEED)
    path = arenas[0].directory / "slot0"
    whole = path.read_bytes()
    for offset in rng.sample(range(len(whole)), 150):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x55]) + whole[offset + 1 :])
        assert shown_step(root) == 5
    for arena in arenas:
        arena.close()


def test_all_copies_damaged_is_an_error_that_names_them(root: Path, arena: Arena) -> None:
    for index in (0, 1):
        (arena.directory / f"slot{index}").write_bytes(b"#!/bin/sh\n" + bytes(5000))
    with pytest.raises(RetryLaterError, match=r"s0h0/slot0: .*foreign file.*; s0h0/slot1: .*foreign file"):
        snapshot.open("job", root=root)


def test_reservation_that_does_not_fit_touches_nothing(root: Path, arena: Arena) -> None:
    before = {path.name: path.read_bytes() for path in arena.directory.iterdir()}
    with pytest.raises(InsufficientMemoryError):
        arena.reserve(1 << 50)
    assert {path.name: path.read_bytes() for path in arena.directory.iterdir()} == before


def test_reader_opened_before_the_damage_gives_no_wrong_bytes(root: Path, arena: Arena) -> None:
    source = arena.find_shards(2)
    path = arena.directory / "slot1"
    with path.open("r+b") as file:
        file.seek(path.read_bytes().rindex(b"\x00\x00\x00\x40" * 16))  # the last of `split`, 2.0
        file.write(bytes(64))
    damaged, intact = ((2048, 4096), (0, 16)), ((0, 2048), (0, 16))
    with pytest.raises(MissingShardError, match=r"\[2048:4096, 0:16\] at step 2"):
        source.read(SPLIT, damaged)
    assert (source.read(SPLIT, intact).view("float32") == 2).all()
    source.close()


def test_worker_goes_on_after_a_growth_that_found_no_room(
    root: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, nbytes: int) -> None:  # another process takes the room as soon as it is free
        raise InsufficientMemoryError(nbytes, 0, str(path))

    with monkeypatch.context() as patch:
        patch.setattr("snapshot.reserve.grow_file", refuse)
        with pytest.raises(InsufficientMemoryError):
            arena.slot_for_write(4 << 20, 3)
    capture_step(arena, 3, static=static_of(A, num_rows=NUM_ROWS, both_halves=True))
    assert shown_step(root) == 3


def test_agent_that_takes_over_frees_what_the_killed_one_was_making(root: Path, arena: Arena) -> None:
    for name in ("slot1.new", "stage.part"):
        (arena.directory / name).write_bytes(bytes(1 << 20))
    successor = Arena.attach("job", A, root=root)
    successor.reserve(required_bytes(static_of(A, num_rows=NUM_ROWS, both_halves=True)))
    names = sorted(path.name for path in arena.directory.iterdir())
    successor.close()
    assert names == ["lock", "slot0", "slot1"]
