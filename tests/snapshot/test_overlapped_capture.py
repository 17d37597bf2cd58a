"""Captures that go on beside the training loop, forced on CPU devices: their pinned memory is a copy too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax_helpers import HOSTS, as_bytes, every_kind_of_leaf, hosts_of, make_mesh, put

from reshard.errors import UsageError
from reshard.redundancy import captures
from snapshot import device_buffers
from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.restore import restore
from snapshot.tree import flatten, layout_of, target_of


class HeldBack:
    """A clock that stops the thread of a capture until it is let go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.is_copying = threading.Event()
        self._loop = threading.get_ident()

    def __call__(self) -> float:
        if threading.get_ident() != self._loop:
            self.is_copying.set()
            assert self.go_on.wait(timeout=30)
        return 0.0


@contextmanager
def overlapping(root: Path, state: Any, **options: Any) -> Iterator[tuple[Arena, Capturer]]:
    mesh = make_mesh(1)
    layout = layout_of(state, mesh, hosts_of(mesh))
    arena = Arena.create("job", HOSTS[0], root=root)
    capturer = Capturer(arena, layout, HOSTS[0], captures(layout, 1)[HOSTS[0]], overlap=True, **options)
    arena.reserve(capturer.slot_bytes)
    capturer.warm_up(state)
    try:
        yield arena, capturer
    finally:
        arena.unlink()


def some_leaves() -> dict[str, Any]:
    kinds = ("float32", "bfloat16", "int4", "empty", "key", "single", "numpy", "int")
    return {kind: leaf for kind, leaf in every_kind_of_leaf(make_mesh(1)).items() if kind in kinds}


def steps_in(arena: Arena) -> list[int]:
    contents = arena.manifests()
    assert contents.rejected == ()
    return [manifest.step for manifest in contents.complete]


def restored(arena: Arena, state: Any, step: int) -> Any:
    source = arena.find_shards(step)
    try:
        return restore(target_of(state), source)
    finally:
        source.close()


def contents_of(state: Any) -> list[Any]:
    return [as_bytes(leaf) for leaf in flatten(state).leaves]


LABELS = {"generation": 1, "position": 0}


@pytest.mark.parametrize("pinned", [True, False])
def test_snapshot_is_of_the_state_at_start_though_the_next_steps_are_donated_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    if not pinned:
        monkeypatch.setattr(device_buffers, "PINNED", "no such memory")
    clock = HeldBack()
    state = some_leaves()
    before = contents_of(state)
    step = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
    with overlapping(root, state, clock=clock) as (arena, capturer):
        assert capturer.overlaps
        capturer.start(state, step=1, **LABELS)
        result = state["float32"]
        for _ in range(3):
            result = step(result)
        jax.block_until_ready(result)
        assert state["float32"].is_deleted()
        for leaf in state.values():
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        state["numpy"] += 1  # the loop may change its own values in place
        assert capturer.in_flight
        assert steps_in(arena) == []
        clock.go_on.set()
        stats = capturer.finish()
        assert stats is not None
        assert stats.step == 1
        assert steps_in(arena) == [1]
        assert capturer.finish() is None
        assert not capturer.in_flight
        again = some_leaves()
        assert contents_of(restored(arena, again, 1)) == before
        capturer.capture(again, step=2, **LABELS)
        for _, holdings in arena.verified_snapshots().snapshots:
            assert tuple(holding.checksum for holding in holdings) == stats.checksums


def test_one_capture_is_in_flight_at_most(root: Path) -> None:
    clock = HeldBack()
    state = {"w": put(make_mesh(1), np.arange(8.0, dtype=np.float32), "model")}
    with overlapping(root, state, clock=clock) as (arena, capturer):
        capturer.start(state, step=1, **LABELS)
        for begin in (capturer.start, capturer.capture):
            with pytest.raises(UsageError, match="step 2 while another is in flight"):
                begin(state, step=2, **LABELS)
        clock.go_on.set()
        assert capturer.finish() is not None
        capturer.start(state, step=2, **LABELS)
        assert capturer.finish() is not None
        assert steps_in(arena) == [2, 1]


def test_failure_beside_the_loop_is_raised_by_finish_and_the_older_snapshot_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": put(make_mesh(1), np.arange(8.0, dtype=np.float32), "model"), "n": 3}
    with overlapping(root, state) as (arena, capturer):
        capturer.start(state, step=1, **LABELS)
        assert capturer.finish() is not None

        def fail(*_: object) -> int:
            raise MemoryError("no memory for the copy")

        monkeypatch.setattr("snapshot.capture.copy_and_hash", fail)
        capturer.start(state, step=2, **LABELS)
        with pytest.raises(MemoryError, match="no memory for the copy"):
            capturer.finish()
        assert capturer.finish() is None
        assert steps_in(arena) == [1]
        monkeypatch.undo()
        with pytest.raises(UsageError, match=r"\['n'\] is (now )?float64"):
            capturer.start({**state, "n": 0.5}, step=3, **LABELS)
        capturer.start(state, step=3, **LABELS)
        assert capturer.finish() is not None
        assert steps_in(arena) == [3, 1]


def test_closing_the_arena_meanwhile_is_an_error_and_no_crash(root: Path) -> None:
    clock = HeldBack()
    state = {"w": put(make_mesh(1), np.zeros(1 << 20, np.float32), "model")}
    with overlapping(root, state, clock=clock) as (arena, capturer):
        capturer.start(state, step=1, **LABELS)
        assert clock.is_copying.wait(timeout=30)
        arena.close()
        clock.go_on.set()
        with pytest.raises(ValueError, match="released"):
            capturer.finish()
    assert list(root.glob("*/*")) == []


def test_start_on_cpu_is_a_whole_capture(root: Path) -> None:
    state = {"w": put(make_mesh(1), np.arange(8.0, dtype=np.float32), "model")}
    with overlapping(root, state) as (arena, _):
        layout = layout_of(state, make_mesh(1), hosts_of(make_mesh(1)))
        capturer = Capturer(arena, layout, HOSTS[0], captures(layout, 1)[HOSTS[0]])
        assert not capturer.overlaps
        capturer.start(state, step=1, **LABELS)
        assert not capturer.in_flight
        assert steps_in(arena) == [1]
        stats = capturer.finish()
        assert stats is not None
        assert stats.overlapped_s == 0.0
