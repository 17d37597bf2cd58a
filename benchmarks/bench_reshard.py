"""From 8 devices to 6 of them: how long does our recovery take, beside `jax.device_put` and Orbax's restore?

A state of 1 GiB in 100 leaves, on 8 virtual CPU devices of one process, partitioned over both mesh axes. The
bound is one thread copying the bytes, shard by shard: into memory that is there already ("touched"), and into
fresh memory of the allocator that JAX uses too. All others end with the state on 6 devices, in fresh memory:

recovery    what an agent and a worker do: verify all, plan, restore
restore     plan and restore, each shard verified as it is read; the target is for this one
unverified  the same without checksums: what they cost
device_put  of the live arrays, in one call: the source is in the process already, nothing is verified
orbax       restore from /dev/shm with its defaults; orbax_raw: without compression

Each figure is of a process of its own, where one leaf was restored before. Before the time begins, as much
memory as will be needed is touched and given back: else who comes first pays for what the machine's owner
(a hypervisor) has not handed out yet. The kinds take turns, and ratios are within a round.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from figures import Interval, median_interval, spread
from machine import fail, hand_over, is_quiet, load1, parser
from snapshot_states import (
    DEVICES,
    FEWER_DEVICES,
    HOST,
    STEP,
    make_capturer,
    make_state,
    shape_of_leaf,
    sharding,
    snapshot_root,
)

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
TARGET = 1.0
"""Of what the faster peer takes."""

Tree = dict[str, Any]


def options() -> Namespace:
    made = parser(__doc__ or "", "reshard.json")
    made.add_argument("--mib", type=float, default=None, help="size of the state (default 1024; smoke 24)")
    made.add_argument("--leaves", type=int, default=None, help="arrays in it (default 100; smoke 10)")
    made.add_argument("--rounds", type=int, default=None, help="processes of each kind (default 9; smoke 1)")
    made.add_argument("--child", choices=(*KINDS, "save"), help="do one thing (the benchmark's own use)")
    made.add_argument("--root", type=Path, help="where the snapshots are (with --child)")
    given = made.parse_args()
    given.mib = given.mib or (24 if given.smoke else 1024)
    given.leaves = given.leaves or (10 if given.smoke else 100)
    given.rounds = given.rounds or (1 if given.smoke else 9)
    given.shape = shape_of_leaf(given.mib * MIB, given.leaves)
    given.paths = [f"layer{index:03}" for index in range(given.leaves)]
    given.nbytes = given.leaves * given.shape[0] * given.shape[1] * 4
    return given


# ---- what is measured, each in a process of its own ----


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


# ---- the rounds ----


def run_child(given: Namespace, kind: str, root: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, "--root", str(root), "--mib", str(given.mib)]
    command += ["--leaves", str(given.leaves)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{kind} ended with status {done.returncode}\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(given: Namespace) -> dict[str, list[dict[str, float]]]:
    """What the processes of each kind measured, in order."""
    with snapshot_root() as root:
        arena = Arena.create("bench", HOST, root=root)
        state = make_state(given.mib * MIB, given.leaves)
        make_capturer(arena, state).capture(state, step=STEP, generation=1, position=0)
        del state
        run_child(given, "save", root)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for index in range(given.rounds):
            turn = index % len(KINDS)
            for kind in KINDS[turn:] + KINDS[:turn]:
                found[kind].append(run_child(given, kind, root))
        arena.unlink()
    return found


def ratios(found: dict[str, list[float]], kind: str, bases: list[float]) -> Interval:
    return median_interval([one / base for one, base in zip(found[kind], bases, strict=True)])


def main() -> None:
    given = options()
    if given.child:
        print(json.dumps(child(given)))
        return
    load_before = load1()
    measured = measure(given)
    seconds = {kind: [one["seconds"] for one in found] for kind, found in measured.items()}
    cpu_s = {kind: statistics.median(one["cpu_s"] for one in found) for kind, found in measured.items()}
    to_fresh = {kind: ratios(seconds, kind, seconds["fresh"]) for kind in KINDS}
    fastest = [min(of_round) for of_round in zip(*(seconds[kind] for kind in PEERS), strict=True)]
    result = {kind: ratios(seconds, kind, fastest) for kind in OURS}
    print(f"state  {given.nbytes / 1e9:.2f} GB, {given.leaves} leaves, {DEVICES} to {FEWER_DEVICES} devices")
    print(f"{'':11} {'ms, median':>10}  {'x fresh copy':>18}  {'CPU s':>5}  x the faster peer of the round")
    for kind in KINDS:
        beside = show(result[kind]) if kind in result else ""
        median_ms = statistics.median(seconds[kind]) * 1e3
        print(f"{kind:11} {median_ms:10.0f}  {show(to_fresh[kind])}  {cpu_s[kind]:5.2f}  {beside}")
    verdict = "pass" if result["restore"].median <= TARGET else "miss"
    print(f"target     restore <= {TARGET:.2f} x the faster peer: {verdict}")
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        "bytes": given.nbytes,
        "leaves": given.leaves,
        "seconds": {kind: spread(taken).as_dict() for kind, taken in seconds.items()},
        "cpu_s": {kind: round(value, 4) for kind, value in cpu_s.items()},
        "x_fresh": {kind: as_dict(interval) for kind, interval in to_fresh.items()},
        "x_faster_peer": {kind: as_dict(interval) for kind, interval in result.items()},
        "target": TARGET,
        "verdict": verdict,
        "is_clear": not result["restore"].spans(TARGET),
    }
    hand_over("reshard", figures, given.json, smoke=given.smoke, load_before=load_before)


def show(interval: Interval) -> str:
    return f"{interval.median:5.2f} [{interval.low:.2f}, {interval.high:.2f}]".rjust(18)


def as_dict(interval: Interval) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(interval).items()}


if __name__ == "__main__":
    main()
