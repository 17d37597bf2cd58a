"""What does a training step pay for a snapshot at every step, and does an adaptive cadence keep its budget?

One process, one CPU device, a donated step on a state of 200 MB, captured as a world captures it
(`elastic.paced_capture`, a snapshot in /dev/shm that is complete before the next step). The unit is the
floor: one thread that copies the same bytes into the same kind of memory with np.copyto. First a step of 30
floors: blocks of bare steps, of steps with the floor's copy, and of steps with a capture alternate. Then a
step of 4 floors (or as short as the update of the state allows) under budgets for the stall.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from demo_jobs import exit_on_sigterm
from figures import Interval, median_interval, overheads, own_noise
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from machine import RUNS, hand_over, is_quiet, load1, parser

from elastic.cadence import EVERY_STEP, Cadence, StallBudget
from elastic.paced_capture import PacedCapture
from elastic.ports import Link
from reshard.ids import HostId
from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.tree import layout_of

TARGET = 0.03
LONG_STEP, SHORT_STEP = 30, 4
"""Lengths of a step, in floors."""
BUDGETS = (0.01, 0.05)
NUM_LEAVES = 40
HOST = HostId(slice_index=0)
State = list[jax.Array]


class NoLink:
    """A link of a world whose snapshots nobody copies."""

    def replicated_step(self, generation: int) -> int | None:
        return None

    def is_fenced(self, generation: int) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What came of a budget: fractions of the time without stalls."""

    budget: float
    spent: float
    largest_stall: float
    num_captures: int
    num_steps: int
    interval_steps: int

    @property
    def is_kept(self) -> bool:
        """Whether no more was spent, but for the last capture, whose steps had not been made yet."""
        return self.spent <= self.budget + self.largest_stall


def options() -> Namespace:
    made = parser(__doc__ or "", "stall.json")
    made.add_argument("--mb", type=float, default=None, help="size of the state (default 200; smoke 8)")
    made.add_argument("--rounds", type=int, default=None, help="rounds of blocks (default 12; smoke 2)")
    made.add_argument("--block", type=int, default=None, help="steps of a block (default 4; smoke 2)")
    made.add_argument("--steps", type=int, default=None, help="steps of a budget (default 400; smoke 30)")
    made.add_argument(
        "--out", type=Path, default=RUNS / "stall", help="ignored: snapshots are in a folder of /dev/shm"
    )
    given = made.parse_args()
    given.mb = given.mb or (8 if given.smoke else 200)
    given.rounds = given.rounds or (2 if given.smoke else 12)
    given.block = given.block or (2 if given.smoke else 4)
    given.steps = given.steps or (30 if given.smoke else 400)
    return given


@contextmanager
def arena() -> Iterator[Arena]:
    """A host's snapshot memory, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="elastic-slices-bench-", dir="/dev/shm") as root:
        made = Arena.create("stall", HOST, root=Path(root))
        try:
            yield made
        finally:
            made.unlink()


def train_step(state: State, num_products: int) -> State:
    """So many matrix products, and an update of every leaf that depends on them."""
    start = jnp.full((256, 256), 1e-3, jnp.float32)
    product = jax.lax.fori_loop(0, num_products, lambda _, x: jnp.tanh(x @ x), start)
    scale = 1 + 1e-9 * product.mean()
    return [leaf * scale for leaf in state]


class Loop:
    """The training loop of the benchmark: steps of a chosen length, and what happens after each."""

    def __init__(self, memory: Arena, nbytes: float) -> None:
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        place = NamedSharding(mesh, PartitionSpec())
        rows = max(int(nbytes / NUM_LEAVES / 4 / 1024), 1)
        make = jax.jit(
            lambda: [jnp.full((rows, 1024), 1.0 + index, jnp.float32) for index in range(NUM_LEAVES)],
            out_shardings=[place] * NUM_LEAVES,
        )
        self._state: State = jax.block_until_ready(make())
        layout = layout_of(self._state, mesh, {mesh.devices.flat[0].id: HOST}, elastic_axis="data")
        self._capturer = Capturer(memory, layout, HOST, captures(layout, 1)[HOST])
        memory.reserve(self._capturer.slot_bytes)
        self._capturer.warm_up(self._state)
        self._step = jax.jit(train_step, donate_argnums=0)
        self._targets = [np.ones((rows, 1024), np.float32) for _ in self._state]
        self._num_products = 0
        self.nbytes = sum(leaf.nbytes for leaf in self._state)

    def run_step(self) -> float:
        """One step; returns its seconds."""
        began_s = time.perf_counter()
        self._state = jax.block_until_ready(self._step(self._state, self._num_products))
        return time.perf_counter() - began_s

    def copy(self) -> float:
        """The floor: one thread copies the state into memory that is faulted in; returns its seconds."""
        began_s = time.perf_counter()
        for target, leaf in zip(self._targets, self._state, strict=True):
            np.copyto(target, _view(leaf))
        return time.perf_counter() - began_s

    def calibrate(self, wanted_s: float) -> float:
        """Make a step last about `wanted_s`, or as little as it can; returns what it lasts then."""
        self._num_products = 0
        self.run_step()
        least_s = self._typical_s()
        self._num_products = 100
        products_s = max(self._typical_s() - least_s, 1e-4)
        self._num_products = max(round(100 * (wanted_s - least_s) / products_s), 0)
        return self._typical_s()

    def paced(self, cadence: Cadence) -> PacedCapture:
        """Captures of this loop's state, as those of a new world."""
        devices = tuple(self._state[0].devices())
        return PacedCapture(cadence, [self._capturer], devices, cast(Link, NoLink()), 1)

    def commit(self, paced: PacedCapture, step: int, work_s: float) -> Any:
        """What `world.commit` does for a snapshot."""
        return paced.after_step(
            self._state, step, step, num_steps=None, is_leaving=False, work_s=work_s, compile_s=0.0
        )

    def _typical_s(self) -> float:
        return statistics.median(self.run_step() for _ in range(3))


def _view(leaf: jax.Array) -> np.ndarray[Any, Any]:
    """The leaf's memory by address: np.asarray would keep its buffer from donation."""
    pointer = leaf.addressable_data(0).unsafe_buffer_pointer()
    buffer = (ctypes.c_ubyte * leaf.nbytes).from_address(pointer)
    return np.frombuffer(buffer, np.float32).reshape(leaf.shape)


def measure_every_step(loop: Loop, rounds: int, block: int) -> dict[str, list[float]]:
    """Seconds of each block of each kind, and of each capture; the kinds take turns in going first."""
    paced, step = loop.paced(EVERY_STEP), 0
    seconds: dict[str, list[float]] = {"bare": [], "floor": [], "engine": [], "stall": [], "copy": []}
    for index in range(-1, rounds):
        kinds = ["bare", "floor", "engine"]
        for kind in kinds if index % 2 else reversed(kinds):
            began_s = time.perf_counter()
            for _ in range(block):
                work_s = loop.run_step()
                if kind == "floor":
                    seconds["copy"].append(loop.copy())
                elif kind == "engine":
                    seconds["stall"].append(loop.commit(paced, step, work_s).stall_s)
                    step += 1
            if index >= 0:  # the round before warms up
                seconds[kind].append((time.perf_counter() - began_s) / block)
    return seconds


def measure_budget(loop: Loop, fraction: float, num_steps: int) -> Budget:
    """Run so many steps under a budget."""
    paced, work_s, stalls_s, held_s, interval_steps = (
        loop.paced(StallBudget(fraction=fraction)),
        0.0,
        [],
        0.0,
        1,
    )
    for step in range(num_steps):
        step_s = loop.run_step()
        taken = loop.commit(paced, step, step_s)
        work_s += step_s
        held_s += taken.stall_s
        if taken.captured_bytes:
            stalls_s.append(taken.stall_s)
        interval_steps = taken.interval_steps
    return Budget(
        budget=fraction,
        spent=held_s / work_s,
        largest_stall=max(stalls_s) / work_s,
        num_captures=len(stalls_s),
        num_steps=num_steps,
        interval_steps=interval_steps,
    )


def show_every_step(engine: Interval, floor: Interval, stall: float, step_s: float, copy_s: float) -> None:
    print(f"bound    0.00 %  the bare step, {step_s * 1e3:.1f} ms, {step_s / copy_s:.1f} floors")
    print(f"floor    {_range(floor)}  with one thread's copy after each step ({copy_s * 1e3:.2f} ms)")
    print(f"target  <={TARGET:.2%}")
    print(f"engine   {_range(engine)}  with a capture after each step: {_verdict(engine.median <= TARGET)}")
    print(f"stall    {stall:6.2%}  of the bare step is what a capture holds the loop for (median)\n")


def show_budgets(budgets: Sequence[Budget], step_s: float, copy_s: float) -> None:
    print(f"budgets, at a step of {step_s * 1e3:.1f} ms, {step_s / copy_s:.1f} floors")
    for found in budgets:
        print(
            f"  {found.budget:6.2%}  spent {found.spent:6.2%}, {found.num_captures} captures in"
            f" {found.num_steps} steps, every {found.interval_steps} at the end: {_verdict(found.is_kept)}"
        )
    print()


def _range(interval: Interval) -> str:
    return f"{interval.median:6.2%} [{interval.low:.2%}, {interval.high:.2%}]"


def _verdict(is_met: bool) -> str:
    return "pass" if is_met else "miss"


def main() -> None:
    given = options()
    exit_on_sigterm()
    load_before = load1()
    print(f"stall: {given.mb:g} MB in {NUM_LEAVES} leaves, one device (load {load_before})", flush=True)
    with arena() as memory:
        loop = Loop(memory, given.mb * 1e6)
        loop.copy()
        copy_s = statistics.median(loop.copy() for _ in range(7))
        loop.calibrate(LONG_STEP * copy_s)
        seconds = measure_every_step(loop, given.rounds, given.block)
        copy_s = statistics.median(seconds["copy"])
        engine = median_interval(overheads(seconds["engine"], seconds["bare"]))
        floor = median_interval(overheads(seconds["floor"], seconds["bare"]))
        bare_s, stall_s = statistics.median(seconds["bare"]), statistics.median(seconds["stall"])
        show_every_step(engine, floor, stall_s / bare_s, bare_s, copy_s)
        short_s = loop.calibrate(SHORT_STEP * copy_s)
        budgets = [measure_budget(loop, fraction, given.steps) for fraction in BUDGETS]
        show_budgets(budgets, short_s, copy_s)
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        "overhead": round(engine.median, 5),
        "overhead_interval": [round(engine.low, 5), round(engine.high, 5)],
        "floor": round(floor.median, 5),
        "stall_of_step": round(stall_s / bare_s, 5),
        "stall_of_copy": round(stall_s / copy_s, 3),
        "step_of_copy": round(bare_s / copy_s, 2),
        "noise": round(own_noise(seconds["bare"]), 5),
        "target": TARGET,
        "verdict": _verdict(engine.median <= TARGET),
        "captured_bytes": loop.nbytes,
        "budgets": [
            {
                "budget": found.budget,
                "spent": round(found.spent, 5),
                "captures": found.num_captures,
                "steps": found.num_steps,
                "interval_steps": found.interval_steps,
                "is_kept": found.is_kept,
            }
            for found in budgets
        ],
        "short_step_of_copy": round(short_s / copy_s, 2),
    }
    hand_over("stall", figures, given.json, smoke=given.smoke, load_before=load_before)


if __name__ == "__main__":
    main()
