"""How long does it take to put a snapshot back on 8 devices, or on 6 of them?

A state of 1 GiB in 100 leaves, captured on 8 virtual CPU devices. Each figure is of a process of its own, as
after a respawn: all memory is fresh. The floor is one thread copying the snapshot's bytes with np.copyto
into arrays of np.empty, one a leaf, the source mapped and faulted in before. A restore reads and verifies
every shard. The kinds take turns; the first step after the restore, a donated update of every leaf, is
timed too, since a restore could leave work to it.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from figures import Interval, median_interval, spread
from machine import hand_over, is_quiet, load1, parser, run_child
from peers import add_peer_options, run_peer
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
    timed,
)

from snapshot.arena import Arena
from snapshot.copying import default_num_threads
from snapshot.restore import restore

TARGET = 1.2
MIB = 1 << 20
KINDS = ("floor", "same", "fewer")


def options() -> Namespace:
    made = parser(__doc__ or "", "restore.json")
    made.add_argument("--mib", type=float, default=None, help="size of the state (default 1024; smoke 24)")
    made.add_argument("--leaves", type=int, default=None, help="arrays in it (default 100; smoke 10)")
    made.add_argument("--reps", type=int, default=None, help="processes of each kind (default 7; smoke 1)")
    made.add_argument(
        "--threads",
        type=int,
        default=default_num_threads(),
        help="threads that restore (default: %(default)s)",
    )
    made.add_argument("--peer-reps", type=int, default=3, help="rounds of the peers (default: %(default)s)")
    made.add_argument(
        "--child", choices=KINDS, help="measure one kind and print it (the benchmark's own use)"
    )
    made.add_argument("--root", type=Path, help="where the snapshot is (with --child)")
    add_peer_options(made, "orbax")
    given = made.parse_args()
    given.mib = given.mib or (24 if given.smoke else 1024)
    given.leaves = given.leaves or (10 if given.smoke else 100)
    given.reps = given.reps or (1 if given.smoke else 7)
    return given


def child(given: Namespace) -> dict[str, float]:
    """Measure one kind in this process."""
    arena = Arena.attach("bench", HOST, root=given.root)
    shape = shape_of_leaf(given.mib * MIB, given.leaves)
    jax.devices()
    if given.kind == "floor":
        return {"seconds": copy_to_fresh_memory(arena, given.leaves, shape)}
    place = sharding(DEVICES if given.kind == "same" else FEWER_DEVICES)
    paths = [f"layer{index:03}" for index in range(given.leaves)]
    target = {path: jax.ShapeDtypeStruct(shape, np.float32, sharding=place) for path in paths}
    source = arena.find_shards(STEP)
    seconds, state = timed(lambda: restore(target, source, num_threads=given.threads))
    source.close()
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree), donate_argnums=0)
    compiled = update.lower(target).compile()
    first_step_s, state = timed(lambda: compiled(state))
    steps_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        state = jax.block_until_ready(compiled(state))
        steps_s.append(time.perf_counter() - began_s)
    arena.close()
    return {"seconds": seconds, "first_step_s": first_step_s, "step_s": statistics.median(steps_s)}


def copy_to_fresh_memory(arena: Arena, num_leaves: int, shape: tuple[int, int]) -> float:
    slot = arena.slot_for_write(0, STEP + 1)  # mapped, faulted in; nothing is written to it
    parts = np.frombuffer(slot.hold(), np.float32)[-num_leaves * shape[0] * shape[1] :]
    parts = parts.reshape(num_leaves, *shape)

    def copy() -> list[Any]:
        made = []
        for part in parts:
            made.append(np.empty(shape, np.float32))
            np.copyto(made[-1], part)
        return made

    return timed(copy)[0]


def measure_one(given: Namespace, kind: str, root: Path) -> dict[str, float]:
    arguments = ["--child", kind, "--root", str(root), "--mib", str(given.mib)]
    arguments += ["--leaves", str(given.leaves), "--threads", str(given.threads)]
    return run_child(__file__, kind, *arguments)


def measure(given: Namespace) -> dict[str, list[dict[str, float]]]:
    """What the processes of each kind measured, in order."""
    state = make_state(given.mib * MIB, given.leaves)
    with snapshot_root() as root:
        arena = Arena.create("bench", HOST, root=root)
        capturer = make_capturer(arena, state)
        capturer.capture(state, step=STEP, generation=1, position=0)
        del state
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for index in range(given.reps):
            for kind in KINDS[index % len(KINDS) :] + KINDS[: index % len(KINDS)]:
                found[kind].append(measure_one(given, kind, root))
        arena.unlink()
    return found


def main() -> None:
    given = options()
    if given.child:
        given.kind = given.child
        print(json.dumps(child(given)))
        return
    load_before = load1()
    found = measure(given)
    floors = [one["seconds"] for one in found["floor"]]
    floor_s = statistics.median(floors)
    shape = shape_of_leaf(given.mib * MIB, given.leaves)
    nbytes = given.leaves * shape[0] * shape[1] * 4
    result = {
        kind: median_interval(
            [one["seconds"] / floor for one, floor in zip(found[kind], floors, strict=True)]
        )
        for kind in ("same", "fewer")
    }
    print(f"state   {nbytes / 1e9:.2f} GB, {given.leaves} leaves, {DEVICES} devices, {given.threads} threads")
    print(f"floor    1.00  {floor_s * 1e3:.0f} ms: one thread, np.copyto into np.empty")
    print(f"target <={TARGET:.2f}")
    for kind, devices in (("same", DEVICES), ("fewer", FEWER_DEVICES)):
        verdict = "pass" if result[kind].median <= TARGET else "miss"
        first = statistics.median(one["first_step_s"] for one in found[kind]) / floor_s
        later = statistics.median(one["step_s"] for one in found[kind]) / floor_s
        print(
            f"restore {show(result[kind])}  to {devices} devices: {verdict};"
            f" the first step {first:.2f}, later ones {later:.2f}"
        )
    peers = peer_figures(given, floor_s)
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        "bytes": nbytes,
        "leaves": given.leaves,
        "threads": given.threads,
        "floor_s": spread(floors).as_dict(),
        "same_x_floor": as_dict(result["same"]),
        "fewer_x_floor": as_dict(result["fewer"]),
        "first_step_x_floor": {
            kind: round(statistics.median(one["first_step_s"] for one in found[kind]) / floor_s, 4)
            for kind in result
        },
        "target": TARGET,
        "verdict": "pass" if all(one.median <= TARGET for one in result.values()) else "miss",
        "is_clear": not any(one.spans(TARGET) for one in result.values()),
        "peers_x_floor": peers,
    }
    hand_over("restore", figures, given.json, smoke=given.smoke, load_before=load_before)


def peer_figures(given: Namespace, floor_s: float) -> dict[str, dict[str, float]]:
    """What Orbax's restores take, in units of our floor."""
    sizes = {"nbytes": given.mib * MIB, "leaves": given.leaves, "reps": given.peer_reps}
    orbax = run_peer(given, "orbax", **sizes)
    if orbax is None:
        return {}
    found = {
        "same": round(orbax["restore_same_s"]["median"] / floor_s, 2),
        "fewer": round(orbax["restore_other_s"]["median"] / floor_s, 2),
    }
    print(f"peer    orbax: {found['same']:.2f} to {DEVICES} devices, {found['fewer']:.2f} to {FEWER_DEVICES}")
    return {"orbax": found}


def show(interval: Interval) -> str:
    return f"{interval.median:5.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def as_dict(interval: Interval) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(interval).items()}


if __name__ == "__main__":
    main()
