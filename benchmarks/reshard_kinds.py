"""What `bench_reshard.py` measures, each in a process of its own: the bound, our ways, and the peers'."""

from __future__ import annotations

import ctypes
import mmap
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from machine import fail
from snapshot_states import DEVICES, FEWER_DEVICES, HOST, STEP, sharding

from reshard.planner import make_plan
from snapshot.arena import Arena
from snapshot.restore import restore
from snapshot.slot_reader import SlotReader
from snapshot.tree import layout_of

MIB = 1 << 20
BOUNDS = ("touched", "fresh")
OURS = ("recovery", "restore", "unverified")
PEERS = ("device_put", "orbax", "orbax_raw")
KINDS = (*BOUNDS, *OURS, *PEERS)

Tree = dict[str, Any]


def target_on(given: Namespace, num_devices: int, num_leaves: int | None = None) -> Tree:
    place = sharding(num_devices)
    leaf = jax.ShapeDtypeStruct(given.shape, np.float32, sharding=place)
    return dict.fromkeys(given.paths[:num_leaves], leaf)


def restored(arena: Arena, target: Tree) -> Tree:
    source = arena.find_shards(STEP)
    try:
        return restore(target, source)
    finally:
        source.close()


def recovered(arena: Arena, target: Tree, *, verify_first: bool = False) -> Tree:
    """Plan as the coordinator does and restore as a worker does; with one host there is nothing to fetch."""
    if verify_first:
        ((_, holdings),) = arena.verified_snapshots().snapshots
    else:
        (manifest,) = arena.manifests().complete
        holdings = manifest.holdings()
    mesh = sharding(FEWER_DEVICES).mesh
    layout = layout_of(target, mesh, {device.id: HOST for device in mesh.devices.flat})
    plan = make_plan(layout, holdings, step=STEP)
    if plan.bytes_moved or plan.bytes_local != sum(array.nbytes for array in layout.arrays):
        fail("the plan does not give the whole state to the one host")
    return restored(arena, target)


def orbax_checkpointer(*, compressed: bool) -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=compressed))


def load_orbax(path: Path, target: Tree) -> Tree:
    import orbax.checkpoint as ocp

    arguments = {
        name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
        for name, leaf in target.items()
    }
    loaded: Tree = orbax_checkpointer(compressed=True).restore(
        path, args=ocp.args.PyTreeRestore(target, restore_args=arguments)
    )
    return loaded


def save_for_orbax(given: Namespace, arena: Arena) -> None:
    import orbax.checkpoint as ocp

    state = restored(arena, target_on(given, DEVICES))
    for name, compressed in (("orbax", True), ("orbax_raw", False)):
        orbax_checkpointer(compressed=compressed).save(given.root / name, args=ocp.args.PyTreeSave(state))
        orbax_checkpointer(compressed=compressed).save(
            given.root / f"{name}_one", args=ocp.args.PyTreeSave({given.paths[0]: state[given.paths[0]]})
        )


def copier(given: Namespace, arena: Arena, *, fresh: bool) -> Callable[[], Any]:
    """One thread copying what the devices will have, out of a slot that is mapped already."""
    num_elements = given.shape[0] * given.shape[1] // FEWER_DEVICES
    slot = arena.slot_for_write(0, STEP + 1)  # nothing is written to it
    flat = np.frombuffer(slot.hold(), np.float32)
    parts = flat[-given.leaves * FEWER_DEVICES * num_elements :].reshape(-1, num_elements)
    touched = None if fresh else np.ones_like(parts)

    def copy() -> list[Any]:
        made = []
        for index, part in enumerate(parts):
            made.append(np.empty(num_elements, np.float32) if touched is None else touched[index])
            np.copyto(made[-1], part)
        return made

    return copy


def prepared(given: Namespace, arena: Arena) -> Callable[[], Any]:
    """What to time, after the same was done with one leaf."""
    kind, target, one = given.child, target_on(given, FEWER_DEVICES), target_on(given, FEWER_DEVICES, 1)
    if kind in BOUNDS:
        return copier(given, arena, fresh=kind == "fresh")
    if kind in OURS:
        if kind == "unverified":
            read = SlotReader.read_shard_into
            SlotReader.read_shard_into = lambda self, index, out: read(self, index, out, verify=False)
        jax.block_until_ready(restored(arena, one))
        return lambda: recovered(arena, target, verify_first=kind == "recovery")
    if kind == "device_put":
        state = restored(arena, target_on(given, DEVICES))
        place = sharding(FEWER_DEVICES)
        jax.block_until_ready(jax.device_put({name: state[name] for name in one}, place))
        return lambda: jax.device_put(state, place)
    jax.block_until_ready(load_orbax(given.root / f"{kind}_one", one))
    return lambda: load_orbax(given.root / kind, target)


def child(given: Namespace) -> dict[str, float]:
    """Measure one kind in this process."""
    arena = Arena.attach("bench", HOST, root=given.root)
    if given.child == "save":
        save_for_orbax(given, arena)
        return {}
    work = prepared(given, arena)
    touch_memory(2 * given.nbytes + 256 * MIB)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(work())
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    if given.child not in BOUNDS:
        check(given, arena, result)
    return {"seconds": seconds, "cpu_s": cpu_s}


def touch_memory(nbytes: int) -> None:
    """Have so much memory handed out to this machine; give it back to the kernel with what malloc kept."""
    populated = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, int(nbytes), flags=populated).close()
    ctypes.CDLL(None).malloc_trim(0)


def check(given: Namespace, arena: Arena, result: Tree) -> None:
    """Compare some leaves with the snapshot."""
    source = arena.find_shards(STEP)
    for name in given.paths[:: max(1, given.leaves // 3)]:
        whole = tuple((0, size) for size in given.shape)
        if not np.array_equal(source.read(f"[{name!r}]", whole).view(np.float32), np.asarray(result[name])):
            fail(f"{given.child}: {name} is not what was captured")
        if len(result[name].sharding.device_set) != FEWER_DEVICES:
            fail(f"{given.child}: {name} is not on {FEWER_DEVICES} devices")
    source.close()
