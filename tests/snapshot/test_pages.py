"""Faulting pages in: other threads go on, no SIGBUS, and huge pages on a mount that gives them on request."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from snapshot_helpers import REPOSITORY

from reshard.errors import InsufficientMemoryError
from snapshot import pages
from snapshot.shm import map_writable
from snapshot.slot import SlotWriter, allocate_slot

MIB = 1 << 20
ON_MOUNT = """
import sys
from pathlib import Path
from reshard.errors import InsufficientMemoryError
from snapshot.pages import huge_page_setting
from snapshot.shm import available_bytes, map_writable
from snapshot.slot import SlotWriter, allocate_slot

root, huge = Path(sys.argv[1]), sys.argv[2]
room = available_bytes(root)
try:
    allocate_slot(root / "large", 2 * room)
except InsufficientMemoryError as error:
    assert error.available_bytes == room, error
else:
    raise AssertionError("allocated more than there is")
assert list(root.iterdir()) == [] and available_bytes(root) == room
with (root / "sparse").open("wb") as file:
    file.truncate(2 * room)
try:
    map_writable(root / "sparse")
except InsufficientMemoryError:
    (root / "sparse").unlink()
else:
    raise AssertionError("mapped what cannot be written")
allocate_slot(root / "slot0", 8 << 20)
with (root / "slot0").open() as file:
    assert huge_page_setting(file.fileno()) == huge
writer = SlotWriter(root / "slot0")
lines = Path("/proc/self/smaps").read_text().splitlines()
start = next(index for index, line in enumerate(lines) if line.endswith("/slot0"))
(mapped,) = [line.split()[1] for line in lines[start : start + 30] if line.startswith("ShmemPmdMapped")][:1]
print(mapped)
"""


def on_mount(options: str, huge: str) -> int:
    """Run ON_MOUNT on a tmpfs of its own; returns the kilobytes mapped by huge pages."""
    command = 'mount -t tmpfs -o "$1" none /dev/shm && exec "$2" -c "$3" /dev/shm "$4"'
    arguments = ["unshare", "--mount", "sh", "-c", command, "sh", options, sys.executable, ON_MOUNT, huge]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=50, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("huge", ["never", "advise"])
def test_slots_have_huge_pages_where_the_mount_gives_them_and_never_sigbus(huge: str) -> None:
    huge_kib = on_mount(f"size=24m,huge={huge}", huge)
    assert (huge_kib > 0) == (huge == "advise")


def test_mount_that_refuses_huge_pages_still_holds_slots(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshot.shm.huge_page_setting", lambda _: "advise")
    allocate_slot(root / "slot0", 3 * MIB)
    info = (root / "slot0").stat()
    assert info.st_blocks * 512 == info.st_size == 3 * MIB
    SlotWriter(root / "slot0").close()


def test_kernel_that_cannot_fault_in_is_no_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 12345)
    allocate_slot(root / "slot0", MIB)
    mapping, _ = map_writable(root / "slot0")
    mapping.close()


def test_pages_that_cannot_be_made_are_an_error_and_the_mapping_is_closed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[mmap.mmap] = []

    def fail(mapping: mmap.mmap) -> None:
        made.append(mapping)
        raise OSError(14, "Bad address")

    monkeypatch.setattr("snapshot.shm.fault_in", fail)
    allocate_slot(root / "slot0", MIB)
    with pytest.raises(InsufficientMemoryError):
        map_writable(root / "slot0")
    assert made[0].closed


def test_other_threads_run_while_pages_are_faulted_in(root: Path) -> None:
    allocate_slot(root / "slot0", 256 * MIB)
    ended, ticks = threading.Event(), 0
    with (root / "slot0").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:

        def work() -> None:
            pages.fault_in(mapping)
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        while not ended.wait(0.001):
            ticks += 1
        thread.join()
    assert ticks > 3  # holding Python's lock, the call would let this thread run once before and once after
