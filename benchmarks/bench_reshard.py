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

import json
import statistics
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from figures import Interval, median_interval, spread
from machine import hand_over, is_quiet, load1, parser, run_child
from reshard_kinds import KINDS, MIB, OURS, PEERS, child
from snapshot_states import (
    DEVICES,
    FEWER_DEVICES,
    HOST,
    STEP,
    make_capturer,
    make_state,
    shape_of_leaf,
    snapshot_root,
)

from snapshot.arena import Arena

TARGET = 1.0
"""Of what the faster peer takes."""


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


def measure_one(given: Namespace, kind: str, root: Path) -> dict[str, float]:
    arguments = ["--child", kind, "--root", str(root), "--mib", str(given.mib)]
    arguments += ["--leaves", str(given.leaves)]
    return run_child(__file__, kind, *arguments)


def measure(given: Namespace) -> dict[str, list[dict[str, float]]]:
    """What the processes of each kind measured, in order."""
    with snapshot_root() as root:
        arena = Arena.create("bench", HOST, root=root)
        state = make_state(given.mib * MIB, given.leaves)
        make_capturer(arena, state).capture(state, step=STEP, generation=1, position=0)
        del state
        measure_one(given, "save", root)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for index in range(given.rounds):
            turn = index % len(KINDS)
            for kind in KINDS[turn:] + KINDS[:turn]:
                found[kind].append(measure_one(given, kind, root))
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
