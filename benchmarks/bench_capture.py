"""What does a capture cost the training loop: while it is held, and in the step after it?

A state of 1 GiB in 100 leaves on 8 virtual CPU devices, all captured by one host. The unit is the floor: one
thread copying the same shards with np.copyto into the same slot, its pages faulted in. "price" is how long
the loop is held plus what the next step, a donated update of every leaf, is slower than alone: on CPU a peer
may keep views instead of copying, and the step pays. Everything alternates in one process; the peers run
afterwards, each against a floor of its own.
"""

from __future__ import annotations

import ctypes
import statistics
from argparse import Namespace
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from figures import Interval, median_interval, spread
from machine import fail, hand_over, is_quiet, load1, parser
from peers import add_peer_options, run_peer
from snapshot_states import DEVICES, HOST, make_capturer, make_state, snapshot_root, timed

from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.copying import BLOCK_BYTES, CopyTeam, default_num_threads
from snapshot.manifest import encode_static

TARGET = 0.8
CHECKSUM_TARGET = 0.2
MIB = 1 << 20


def options() -> Namespace:
    made = parser(__doc__ or "", "capture.json")
    made.add_argument("--mib", type=float, default=None, help="size of the state (default 1024; smoke 24)")
    made.add_argument("--leaves", type=int, default=None, help="arrays in it (default 100; smoke 10)")
    made.add_argument("--reps", type=int, default=None, help="counted rounds (default 11; smoke 2)")
    made.add_argument(
        "--threads", type=int, default=default_num_threads(), help="threads that copy (default: %(default)s)"
    )
    made.add_argument("--peer-reps", type=int, default=3, help="rounds of the peers (default: %(default)s)")
    add_peer_options(made, "orbax", "dlrover")
    given = made.parse_args()
    given.mib = given.mib or (24 if given.smoke else 1024)
    given.leaves = given.leaves or (10 if given.smoke else 100)
    given.reps = given.reps or (2 if given.smoke else 11)
    return given


def copy_in_blocks(job: tuple[int, int, int]) -> None:
    target, source, nbytes = job
    for offset in range(0, nbytes, BLOCK_BYTES):
        ctypes.memmove(target + offset, source + offset, min(BLOCK_BYTES, nbytes - offset))


class Round:
    """One round: each kind of copy once, on the state as it is then."""

    def __init__(self, arena: Arena, capturer: Capturer, num_threads: int) -> None:
        self._arena = arena
        self._capturer = capturer
        self._encoded = encode_static(capturer.static)
        self._team = CopyTeam(num_threads)
        self._update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree), donate_argnums=0)

    def run(self, state: dict[str, jax.Array], step: int) -> tuple[dict[str, float], dict[str, jax.Array]]:
        """Seconds of each kind, and the state two updates on."""
        alone_s, state = timed(lambda: self._update(state))
        pairs = self._pairs(state, step)
        floor_s, _ = timed(lambda: [np.copyto(target, source) for target, source in pairs])
        jobs = [(target.ctypes.data, source.ctypes.data, source.nbytes) for target, source in pairs]
        copy_s, _ = timed(lambda: self._team.for_each(copy_in_blocks, jobs, self._nbytes))
        labels = {"step": step, "generation": 1, "position": 0}
        capture_s, stats = timed(lambda: self._capturer.capture(state, **labels))
        if stats.captured_bytes != self._nbytes:
            fail(f"{stats.captured_bytes} of {self._nbytes} bytes were captured")
        after_s, state = timed(lambda: self._update(state))
        times_s = {"update": alone_s, "floor": floor_s, "copy": copy_s, "capture": capture_s}
        return times_s | {"update_after": after_s}, state

    @property
    def _nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._capturer.static.shards)

    def _pairs(self, state: dict[str, jax.Array], step: int) -> list[tuple[Any, Any]]:
        """(target, source) of each shard in the slot that the next capture overwrites.

        Sources are views by address, which keep no buffer from donation.
        """
        slot = self._arena.slot_for_write(self._capturer.slot_bytes, step)
        slot.prepare(self._capturer.static, self._encoded)
        slot.begin()
        shards = [shard.data for leaf in state.values() for shard in leaf.addressable_shards]
        buffers = [
            (ctypes.c_ubyte * shard.nbytes).from_address(shard.unsafe_buffer_pointer()) for shard in shards
        ]
        return [
            (np.frombuffer(view, np.float32), np.frombuffer(buffer, np.float32))
            for view, buffer in zip(slot.shard_views, buffers, strict=True)
        ]


def measure(given: Namespace) -> tuple[list[dict[str, float]], int]:
    """The seconds of each counted round, and the bytes captured in one."""
    state = make_state(given.mib * MIB, given.leaves)
    nbytes = sum(leaf.nbytes for leaf in state.values())
    with snapshot_root() as root:
        arena = Arena.create("bench", HOST, root=root)
        capturer = make_capturer(arena, state, num_threads=given.threads)
        one = Round(arena, capturer, given.threads)
        rounds = []
        for step in range(given.reps + 2):  # the first two warm up both slots
            times_s, state = one.run(state, step)
            rounds.append(times_s)
        arena.unlink()
    return rounds[2:], nbytes


def peer_prices(given: Namespace) -> dict[str, dict[str, float]]:
    """For each peer that is given, in units of its own floor: how long it holds the loop, and its price."""
    prices: dict[str, dict[str, float]] = {}
    sizes = {"nbytes": given.mib * MIB, "leaves": given.leaves, "reps": given.peer_reps}
    orbax = run_peer(given, "orbax", **sizes)
    if orbax is not None:
        slower = orbax["update_in_save_s"]["x_floor"] - orbax["update_alone_s"]["x_floor"]
        held = orbax["save_block_s"]["x_floor"]
        prices["orbax"] = {
            "held": held,
            "price": round(held + slower, 3),
            "floor_s": orbax["memcpy_floor_s"]["median"],
        }
    dlrover = run_peer(given, "dlrover", **sizes)
    if dlrover is not None:
        held = dlrover["save_block_s"]["x_floor"]  # it copies: the next step pays nothing
        prices["dlrover"] = {"held": held, "price": held, "floor_s": dlrover["memcpy_floor_s"]["median"]}
    return prices


def main() -> None:
    given = options()
    load_before = load1()
    rounds, nbytes = measure(given)
    floors = [one["floor"] for one in rounds]

    def in_floors(values: list[float]) -> Interval:
        return median_interval([value / floor for value, floor in zip(values, floors, strict=True)])

    held = in_floors([one["capture"] for one in rounds])
    copy = in_floors([one["copy"] for one in rounds])
    price = in_floors([one["capture"] + one["update_after"] - one["update"] for one in rounds])
    hashing = median_interval([one["capture"] / one["copy"] - 1 for one in rounds])
    floor_s = statistics.median(floors)
    verdict = "pass" if held.median <= TARGET else "miss"
    print(f"state   {nbytes / 1e9:.2f} GB, {given.leaves} leaves, {DEVICES} devices, {given.threads} threads")
    speed = f"{floor_s * 1e3:.1f} ms, {nbytes / floor_s / 1e9:.1f} GB/s"
    print(f"floor    1.00  {speed}: one thread, np.copyto into the same slot")
    print(f"bound   {show(copy)}  {given.threads} threads, the same blocks, no checksums")
    print(f"target <={TARGET:.2f}")
    print(f"capture {show(held)}  checksums, header and commit included: {verdict}")
    print(f"hashing {show(hashing)}  more than the copy alone (target {CHECKSUM_TARGET})")
    print(f"price   {show(price)}  held, and what the next donated update is slower")
    peers = peer_prices(given)
    for name, one in peers.items():
        own = f"its floor {one['floor_s'] * 1e3:.0f} ms"
        print(f"peer    {name}: holds the loop {one['held']:.2f}, price {one['price']:.2f} ({own})")
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        "bytes": nbytes,
        "leaves": given.leaves,
        "threads": given.threads,
        "floor_s": spread(floors).as_dict(),
        "capture_x_floor": as_dict(held),
        "copy_x_floor": as_dict(copy),
        "price_x_floor": as_dict(price),
        "checksum_overhead": as_dict(hashing),
        "target": TARGET,
        "verdict": verdict,
        "is_clear": not held.spans(TARGET),
        "peers_x_floor": peers,
    }
    hand_over("capture", figures, given.json, smoke=given.smoke, load_before=load_before)


def show(interval: Interval) -> str:
    return f"{interval.median:5.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def as_dict(interval: Interval) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(interval).items()}


if __name__ == "__main__":
    main()
