"""SIGKILL at any point of a capture leaves a complete older or newer snapshot (real processes)."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from snapshot_helpers import HOST, shard_data, small_static, start_python

from snapshot.arena import Arena

# Forks one child per command, so that numpy is imported once; the child kills itself at a given traced line
# of snapshot code (0: never), or is killed from outside while it captures in a loop.
ZYGOTE = """
import os, signal, sys
from pathlib import Path
from snapshot.arena import Arena
from snapshot_helpers import HOST, reserve, write_into
root = Path(sys.argv[1])

def tracer(die_at):
    seen = [0]
    def trace(frame, event, arg):
        if "snapshot" not in frame.f_code.co_filename:
            return None
        seen[0] += 1
        if seen[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    return trace, seen

def child(command, value, step):
    arena = Arena.attach("job", HOST, root=root)
    arena.map_slots()
    if command == "loop":
        while True:
            write_into(arena, step)
            print(step, flush=True)
            step += 1
    trace, seen = tracer(value)
    sys.settrace(trace)
    write_into(arena, step)
    sys.settrace(None)
    print(seen[0], flush=True)

print("ready", flush=True)
for line in sys.stdin:
    command, value, step = line.split()
    pid = os.fork()
    if pid == 0:
        child(command, int(value), int(step))
        os._exit(0)
    if command == "loop":
        print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print("ended", status, flush=True)
"""


def assert_intact(arena: Arena, expected: set[int]) -> int:
    """Check that the newest snapshot is one of `expected` and every byte of it is right."""
    contents = arena.manifests()
    assert contents.rejected == ()
    newest = contents.complete[0]
    assert newest.step in expected
    source = arena.find_shards(newest.step)
    for entry, data in zip(small_static().shards, shard_data(small_static(), newest.step), strict=True):
        assert source.read(entry.path, entry.box).tobytes() == data
    assert source.rejected == []
    source.close()
    # Nor does the slot that was being written claim to hold anything.
    assert arena.verified_holdings().rejected == ()
    return newest.step


def test_snapshot_survives_sigkill_at_random_points_of_a_capture(root: Path) -> None:
    rng = random.Random(20)
    arena = Arena.create("job", HOST, root=root)
    arena.reserve(16384)
    zygote = start_python(ZYGOTE, root)
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    stdin, stdout = zygote.stdin, zygote.stdout
    assert stdout.readline() == "ready\n"

    def run(die_at: int, step: int) -> str:
        stdin.write(f"once {die_at} {step}\n")
        stdin.flush()
        return stdout.readline()

    def run_whole(step: int) -> int:
        num_lines = int(run(0, step))
        assert stdout.readline() == "ended 0\n"
        return num_lines

    run_whole(1)
    num_lines = run_whole(2)
    step, seen = 2, set()
    for _ in range(24):  # both slots are complete when a capture is killed
        assert run(rng.randint(1, num_lines), step + 1) == f"ended {int(signal.SIGKILL)}\n"
        survived = assert_intact(arena, {step, step + 1})
        seen.add(survived - step)
        step = survived + 1
        run_whole(step)
    assert 0 in seen
    zygote.stdin.close()
    assert zygote.wait(timeout=10) == 0
    zygote.stdout.close()
    arena.unlink()


@pytest.mark.parametrize("num_captures", [1, 5, 40])
def test_snapshot_survives_sigkill_from_outside_while_capturing(root: Path, num_captures: int) -> None:
    arena = Arena.create("job", HOST, root=root)
    arena.reserve(16384)
    zygote = start_python(ZYGOTE, root)
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    assert zygote.stdout.readline() == "ready\n"
    zygote.stdin.write("loop 0 1\n")
    zygote.stdin.flush()
    lines = [zygote.stdout.readline() for _ in range(1 + num_captures)]
    os.kill(int(lines[0]), signal.SIGKILL)
    rest = zygote.stdout.readline()
    while not rest.startswith("ended"):
        lines.append(rest)
        rest = zygote.stdout.readline()
    last = int(lines[-1])
    assert_intact(arena, {last, last + 1})
    zygote.stdin.close()
    assert zygote.wait(timeout=10) == 0
    zygote.stdout.close()
    arena.unlink()
