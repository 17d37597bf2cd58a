"""A /dev/shm of 64 MB: a clear error before anything is written, and never SIGBUS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'

# Runs where /dev/shm is a fresh tmpfs of 64 MB that nobody else sees.
PROGRAM = """
import errno, json, os, subprocess, sys
from pathlib import Path
from reshard.errors import InsufficientMemoryError
from reshard.layout import Layout, MeshLayout, ArrayLayout
from snapshot.arena import Arena
from snapshot.shm import available_bytes
from view_helpers import A, capture_step, static_of
import snapshot

MB = 1 << 20
shm = Path("/dev/shm")
found = {"empty_at_first": os.listdir(shm) == []}
arena = Arena.create("job", A)
try:
    arena.reserve(40 * MB, journal_record_bytes=512, journal_records=8)
except InsufficientMemoryError as error:
    found["too_big"] = [error.needed_bytes, error.available_bytes, str(error)]
found["left_by_too_big"] = sorted(os.listdir(arena.directory))
found["used_by_too_big"] = 64 * MB - available_bytes(shm)

arena.reserve(20 * MB)

fill = '''
import os
fd = os.open("/dev/shm/filler", os.O_RDWR | os.O_CREAT)
try:
    while True:
        os.write(fd, bytes(1 << 16))
except OSError as error:
    print(error.errno)
'''
filled = subprocess.run([sys.executable, "-c", fill], capture_output=True, text=True, check=True)
found["filler_met_enospc"] = int(filled.stdout) == errno.ENOSPC
found["free_when_full"] = available_bytes(shm)

static = static_of(A, num_rows=240_000, both_halves=True)  # 15.8 MB: nearly all pages of a slot
for step in range(1, 5):
    capture_step(arena, step, static=static)
with snapshot.open("job") as view:
    found["step_when_full"] = view.step
    found["right_when_full"] = bool((view["['split']"] == 4).all())

big = MeshLayout(axis_names=(), axis_sizes=(), hosts=(A,))
layout = Layout(mesh=big, arrays=(ArrayLayout(path="x", shape=(8 * MB,), dtype="int8", itemsize=1),))
for name, act in {
    "stage": lambda: arena.write_stage(
        layout, [("x", ((0, 8 * MB),), bytes(8 * MB))], step=4, generation=2, position=0
    ),
    "larger_slot": lambda: arena.slot_for_write(30 * MB, 5),
    "more_slots": lambda: arena.reserve(20 * MB, num_slots=3),
    "journal": lambda: arena.reserve(20 * MB, journal_record_bytes=1 << 16, journal_records=64),
}.items():
    try:
        act()
        found[name] = "no error"
    except InsufficientMemoryError as error:
        found[name] = "insufficient"
capture_step(arena, 5, static=static)
found["steps_after_all"] = [manifest.step for manifest in arena.manifests().complete]
found["files"] = sorted(os.listdir(arena.directory))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}"}
    inside = ["unshare", "--mount", "--", "bash", "-c", MOUNT, "bash"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs in a mount namespace here (needs root)")
    ended = subprocess.run(
        [*inside, sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        cwd=REPOSITORY,
        check=False,
    )
    assert ended.returncode == 0, (ended.returncode, ended.stderr)  # -7 would be SIGBUS
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def test_reservation_too_big_is_a_clear_error_and_nothing_is_written(found: dict[str, Any]) -> None:
    needed, available, message = found["too_big"]
    assert needed == 80 << 20 > 64 << 20 >= available
    assert "/dev/shm/elastic-job/s0h0 has" in message
    assert "are needed" in message
    assert found["empty_at_first"]
    assert found["left_by_too_big"] == ["lock"]
    assert found["used_by_too_big"] <= 64 << 10


def test_writer_never_meets_sigbus_when_others_fill_the_memory(found: dict[str, Any]) -> None:
    assert found["filler_met_enospc"]
    assert found["free_when_full"] < 1 << 16
    assert (found["step_when_full"], found["right_when_full"]) == (4, True)


def test_growth_without_room_is_refused_and_keeps_what_is_there(found: dict[str, Any]) -> None:
    assert {name: found[name] for name in ("stage", "larger_slot", "more_slots", "journal")} == dict.fromkeys(
        ("stage", "larger_slot", "more_slots", "journal"), "insufficient"
    )
    assert found["steps_after_all"] == [5, 4]
    assert found["files"] == ["lock", "slot0", "slot1"]
