"""Real processes that play worker and agent, and are killed at any point; run as a program, imports no JAX.

One process imports everything once and forks a child a command, so that hundreds of kills are quick.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from snapshot_helpers import start_python
from view_helpers import SPLIT, A, capture_step, static_of

from snapshot.arena import Arena
from snapshot.gc import collect
from snapshot.manifest import StaticManifest
from snapshot.slot import required_bytes
from snapshot.view import View
from snapshot.view import open as open_view

NUM_ROWS = 8192  # 512 KB of the array, so that a copy takes a while


def static() -> StaticManifest:
    return static_of(A, num_rows=NUM_ROWS, both_halves=True)


def slot_bytes() -> int:
    return required_bytes(static())


def worker(root: Path, step: int) -> None:
    """Capture step after step, and never stop."""
    arena = Arena.attach("job", A, root=root)
    known = static()
    while True:
        capture_step(arena, step, static=known)
        step += 1


def trainer(root: Path, step: int) -> None:
    """Train and capture with JAX, step after step, and never stop; all elements of the state are the step."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from reshard.redundancy import captures
    from snapshot.capture import Capturer
    from snapshot.tree import layout_of

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    state = {
        "split": jax.device_put(jnp.full((NUM_ROWS, 16), step, jnp.float32), split),
        "whole": [jax.device_put(jnp.full((NUM_ROWS,), step, jnp.int32), whole)],
    }
    layout = layout_of(state, mesh, {device.id: A for device in mesh.devices.flat})
    arena = Arena.attach("job", A, root=root)
    capturer = Capturer(arena, layout, A, captures(layout, 1)[A])
    arena.reserve(capturer.slot_bytes)
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    while True:
        capturer.capture(state, step=step, generation=1, position=step)
        state = advance(state)
        step += 1


def agent(root: Path, round_index: int) -> None:
    """Do in one round what agents do: attach, grow, verify, stage, collect, drop, and close."""
    arena = Arena.attach("job", A, root=root)
    grown = slot_bytes() + 4096 * round_index
    arena.reserve(grown, journal_record_bytes=256 + 64 * round_index, journal_records=8)
    arena.verified_snapshots()
    held = arena.manifests().complete[0]
    source = arena.find_shards(held.step)
    box = source.boxes(SPLIT)[0]
    data = source.read(SPLIT, box).tobytes()
    source.close()
    arena.write_stage(
        held.static.layout, [(SPLIT, box, data)], step=held.step, generation=held.generation, position=0
    )
    collect(root)
    if round_index % 2:
        arena.drop_stage()
    arena.close()


def collector(root: Path, _: int) -> None:
    collect(root)


ROLES: dict[str, Callable[[Path, int], None]] = {
    "worker": worker,
    "trainer": trainer,
    "agent": agent,
    "collector": collector,
}


def traced(die_at: int) -> tuple[Callable[..., Any], list[int]]:
    """Return a tracer that kills this process at the n-th line of the package (0: never), and its counter."""
    seen = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if f"{os.sep}snapshot{os.sep}" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        seen[0] += 1
        if seen[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace, seen


def serve(root: Path) -> None:
    """Fork a child for each line `role die_at argument`; print its pid, then how it ended."""
    print("ready", flush=True)
    for line in sys.stdin:
        role, die_at, argument = line.split()
        pid = os.fork()
        if pid == 0:
            trace, seen = traced(int(die_at))
            if int(die_at) >= 0:
                sys.settrace(trace)
            ROLES[role](root, int(argument))
            sys.settrace(None)
            print("lines", seen[0], flush=True)
            os._exit(0)
        if int(die_at) < 0:
            print("pid", pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("ended", status, flush=True)


class Forker:
    """Talks to the forking process."""

    def __init__(self, root: Path, *, with_jax: bool = False) -> None:
        # JAX is imported before the fork, but has no backend, and so no threads, until after it.
        code = "import jax, jax.numpy\n" if with_jax else ""
        code += (
            f"import sys; from pathlib import Path; from {__name__} import serve; serve(Path(sys.argv[1]))"
        )
        self._process: subprocess.Popen[str] = start_python(code, root)
        assert self._line() == ["ready"]

    def start(self, role: str, argument: int) -> int:
        """Start a child that runs until it is killed from outside; return its pid."""
        self._send(role, -1, argument)
        return int(self._line()[1])

    def is_running(self, pid: int) -> bool:
        """Tell whether a started child still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True
        return False

    def kill(self, pid: int) -> None:
        """Kill a started child, and wait until it is gone."""
        os.kill(pid, signal.SIGKILL)
        assert self._line() == ["ended", str(int(signal.SIGKILL))]

    def run(self, role: str, argument: int) -> int:
        """Run a child to its end; return how many lines of the package it went through."""
        self._send(role, 0, argument)
        lines = int(self._line()[1])
        assert self._line() == ["ended", "0"]
        return lines

    def run_and_die(self, role: str, die_at: int, argument: int) -> bool:
        """Run a child that kills itself at that line; return whether it came so far."""
        self._send(role, die_at, argument)
        line = self._line()
        if line[0] == "lines":
            line = self._line()
        assert line[0] == "ended"
        return line[1] == str(int(signal.SIGKILL))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=10) == 0
        self._process.stdout.close()

    def _send(self, role: str, die_at: int, argument: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{role} {die_at} {argument}\n")
        self._process.stdin.flush()

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()


def check_whole(root: Path, at_least: int) -> int:
    """Check that there is a complete snapshot not older than `at_least`, all of it of one step; return it."""
    with open_view("job", root=root) as view:
        assert view.rejected == ()
        assert view.step >= at_least
        assert_of_one_step(view)
        return view.step


def assert_of_one_step(view: View) -> None:
    for path, array in view.copies().items():
        assert (array == np.full_like(array, view.step)).all(), f"{path} of step {view.step} is mixed"
