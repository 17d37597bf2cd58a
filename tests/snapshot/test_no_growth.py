"""Capturing and restoring again and again takes no more memory, files or threads than a few times."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax_helpers import HOSTS, every_kind_of_leaf, hosts_of, make_mesh, put

from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.restore import restore
from snapshot.tree import layout_of, target_of

MIB = 1 << 20


def resident_bytes() -> int:
    """Memory of this process that is not shared with files."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def usage(root: Path) -> tuple[int, int, int]:
    """Open files, threads, and bytes of the arena."""
    files = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), files


def one_host(root: Path, state: Any, **options: Any) -> tuple[Arena, Capturer]:
    mesh = make_mesh(1)
    layout = layout_of(state, mesh, hosts_of(mesh))
    arena = Arena.create("job", HOSTS[0], root=root)
    capturer = Capturer(arena, layout, HOSTS[0], captures(layout, 1)[HOSTS[0]], **options)
    arena.reserve(capturer.slot_bytes)
    return arena, capturer


@pytest.mark.parametrize("overlap", [False, True])
def test_a_thousand_captures_take_no_more_than_a_few(
    root: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    monkeypatch.setattr("snapshot.copying.MIN_BYTES_A_THREAD", 1)
    kinds = ("float32", "int4", "key", "numpy", "int")
    state = {kind: leaf for kind, leaf in every_kind_of_leaf(make_mesh(1)).items() if kind in kinds}
    state["large"] = put(make_mesh(1), np.zeros(32 << 10, np.float32), "model")
    arena, capturer = one_host(root, state, overlap=overlap, num_threads=2)

    def capture(step: int) -> None:
        capturer.start(state, step=step, generation=1, position=0)
        stats = capturer.finish()
        assert stats is not None
        assert stats.step == step

    for step in range(100):
        capture(step)
    used, before = usage(root), resident_bytes()
    for step in range(100, 1100):
        capture(step)
    assert usage(root) == used
    assert resident_bytes() - before < 8 * MIB  # each capture handles 128 KiB: a leak of one in ten shows
    arena.unlink()


def test_memory_of_restored_states_is_freed_and_donation_needs_no_more(root: Path) -> None:
    mesh = make_mesh(1)
    state = [put(mesh, np.full((1024, 1024), index, np.float32), "model") for index in range(8)]
    arena, capturer = one_host(root, state)
    capturer.capture(state, step=1, generation=1, position=0)
    step = jax.jit(lambda tree: [leaf + 1 for leaf in tree], donate_argnums=0)
    target = target_of(state)
    peaks = []
    for _ in range(24):
        source = arena.find_shards(1)
        restored = restore(target, source)
        source.close()
        for _ in range(3):
            restored = jax.block_until_ready(step(restored))
        peaks.append(resident_bytes())
        del restored
    used = usage(root)
    # A leak of one array of 4 MiB a round would make 48 MiB; the allocator may keep a state's 32 MiB or less.
    assert max(peaks[12:]) - max(peaks[:12]) < 32 * MIB
    source = arena.find_shards(1)
    restore(target, source)
    source.close()
    assert usage(root) == used
    arena.unlink()
