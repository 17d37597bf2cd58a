"""The training script of bench_steady_overhead: bare, wrapped and floor steps of one world, taking turns in
one process.

    bare      what one would write without the engine: make the batch, step, wait for the loss
    wrapped   the same step through `world.batches` and `world.commit`, a snapshot at each
    floor     a bare step, then a copy and a hash of the bytes that a snapshot holds: the least a capture does
    split     a wrapped step that waits for its outputs before `commit`, to tell the wait from the commit

All use the one jitted step, which donates its state, and go on from the same state. The schedule is fixed
in advance, so all processes switch at the same step without a word. Each block begins with a step that is
not counted: what the block before left behind (commits on their way to the coordinator) ends in it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

KINDS = ("bare", "wrapped", "floor")
WARM_BLOCKS = ("bare", "wrapped", "floor")


@dataclass(slots=True, kw_only=True)
class Block:
    """What one process measured in one block; times are of the counted steps, the CPU time of all of them.

    `parts_s` holds the same steps by part. `engine_cpu_s` is that of the engine's processes by role; only
    one worker reads it.
    """

    round_index: int
    kind: str
    step_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    engine_cpu_s: dict[str, float] = field(default_factory=dict)


def schedule(rounds: int) -> list[tuple[int, str]]:
    """The blocks in order: (round, kind). Round -1 warms up; the order in a round cycles through all six."""
    orders = list(itertools.permutations(KINDS))
    # Neighbours in this list are mirrored, so that a drift within a round cancels over two rounds.
    mirrored = [order for first in orders[:3] for order in (first, tuple(reversed(first)))]
    main = [(index, kind) for index in range(rounds) for kind in mirrored[index % len(mirrored)]]
    return [*((-1, kind) for kind in WARM_BLOCKS), *main, (rounds, "split"), (rounds + 1, "split")]


def num_commits(rounds: int, block: int) -> int:
    """How many steps of the schedule go through the engine."""
    return sum(kind in ("wrapped", "split") for _, kind in schedule(rounds)) * (block + 1)


class EngineCpu:
    """CPU time of the engine's own processes by role: launcher, coordinator with its services, agents."""

    def __init__(self) -> None:
        launcher = _parent(os.getppid())
        below = list(_descendants(launcher))
        agents = [pid for pid in below if _parent(pid) == launcher and b"elastic.agent" in _command(pid)]
        workers = [pid for pid in below if _parent(pid) in agents]
        coordinator = [pid for pid in below if pid not in agents and pid not in workers]
        self._pids = {"launcher": [launcher], "coordinator": coordinator, "agents": agents}

    def read_s(self) -> dict[str, float]:
        """CPU seconds of each role so far."""
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        return {role: tick_s * sum(map(_ticks, pids)) for role, pids in self._pids.items()}


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12])


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _descendants(child)


class CopyAndHash:
    """Copies a host's distinct shards into shared memory and hashes them, with nothing around it."""

    def __init__(self, state: Any) -> None:
        import jax

        from snapshot.capture_slots import MIN_SLOTS

        self._pieces: list[tuple[int, int, int, int]] = []  # leaf, local shard, offset, bytes
        offset = 0
        for leaf_index, leaf in enumerate(jax.tree.leaves(state)):
            boxes: set[str] = set()
            for shard_index, shard in enumerate(leaf.addressable_shards):
                if str(shard.index) not in boxes:
                    boxes.add(str(shard.index))
                    self._pieces.append((leaf_index, shard_index, offset, shard.data.nbytes))
                    offset += shard.data.nbytes
        self.num_bytes = offset
        # As many as the engine's slots, so that the copies meet the same caches; this memory is tmpfs too.
        self._slots = [memoryview(_faulted_in(offset)) for _ in range(MIN_SLOTS)]
        self._turn = 0

    def __call__(self, state: Any) -> None:
        """Copy and hash once."""
        import jax
        import xxhash

        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        base = ctypes.addressof(ctypes.c_char.from_buffer(slot))
        leaves = jax.tree.leaves(state)
        for leaf_index, shard_index, offset, num_bytes in self._pieces:
            pointer = leaves[leaf_index].addressable_data(shard_index).unsafe_buffer_pointer()
            ctypes.memmove(base + offset, pointer, num_bytes)
            xxhash.xxh3_64_intdigest(slot[offset : offset + num_bytes])


def _faulted_in(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


class BareBatches:
    """Batches as a loop without the engine makes them: shuffled, the process's rows, one call of JAX."""

    def __init__(self, mesh: Any, dataset: Any, global_batch: int) -> None:
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        self._dataset = dataset
        self._global_batch = global_batch
        self._order = np.random.default_rng(0).permutation(len(dataset))
        self._sharding = NamedSharding(mesh, PartitionSpec("data"))
        self._make = jax.make_array_from_process_local_data
        rows = global_batch // jax.process_count()
        self._mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
        self._weight = np.ones(rows, np.float32)
        self._next = 0

    def __call__(self) -> dict[str, Any]:
        """The next global batch."""
        ids = self._order[self._next : self._next + self._global_batch]
        self._next = (self._next + self._global_batch) % (len(self._order) - self._global_batch)
        rows = self._dataset.rows(ids[self._mine]) | {"weight": self._weight}
        return {name: self._make(self._sharding, value) for name, value in rows.items()}


class Loop:
    """Runs blocks of each kind on one state, and times them."""

    def __init__(
        self, world: Any, state: Any, train_step: Any, bare_batches: Any, engine_batches: Any
    ) -> None:
        self._world = world
        self._state = state
        self._train_step = train_step
        self._bare_batches = bare_batches
        self._engine_batches = engine_batches
        self.copy_and_hash = CopyAndHash(state)
        self._steps: dict[str, Callable[[], tuple[list[tuple[str, float]], int]]] = {
            "bare": self._bare,
            "floor": self._floor,
            "wrapped": self._wrapped,
            "split": self._split,
        }

    def run_block(self, round_index: int, kind: str, num_steps: int, engine_cpu: EngineCpu | None) -> Block:
        """One block: a step that is not counted, then `num_steps` that are."""
        block = Block(round_index=round_index, kind=kind)
        run_step = self._steps[kind]
        run_step()
        engine_began_s = engine_cpu.read_s() if engine_cpu else {}
        cpu_began_s = time.process_time()
        for _ in range(num_steps):
            began_s = time.perf_counter()
            marks, step = run_step()
            block.step_s.append(marks[-1][1] - began_s)
            for name, mark_s in marks:
                block.parts_s.setdefault(name, []).append(mark_s - began_s)
                began_s = mark_s
            block.steps.append(step)
        block.cpu_s = time.process_time() - cpu_began_s
        engine_ended_s = engine_cpu.read_s() if engine_cpu else {}
        block.engine_cpu_s = {role: engine_ended_s[role] - engine_began_s[role] for role in engine_ended_s}
        return block

    def _bare(self) -> tuple[list[tuple[str, float]], int]:
        batch = self._bare_batches()
        made_s = time.perf_counter()
        self._state, metrics = self._train_step(self._state, batch)
        dispatched_s = time.perf_counter()
        float(metrics["loss"])
        return [("batch", made_s), ("dispatch", dispatched_s), ("wait", time.perf_counter())], -1

    def _floor(self) -> tuple[list[tuple[str, float]], int]:
        marks, step = self._bare()
        self.copy_and_hash(self._state)
        return [*marks, ("copy_and_hash", time.perf_counter())], step

    def _wrapped(self) -> tuple[list[tuple[str, float]], int]:
        step, batch = self._next_batch()
        made_s = time.perf_counter()
        self._state, metrics = self._train_step(self._state, batch)
        dispatched_s = time.perf_counter()
        self._world.commit(step, self._state, metrics)
        return [("batch", made_s), ("dispatch", dispatched_s), ("commit", time.perf_counter())], step

    def _split(self) -> tuple[list[tuple[str, float]], int]:
        step, batch = self._next_batch()
        made_s = time.perf_counter()
        self._state, metrics = self._train_step(self._state, batch)
        dispatched_s = time.perf_counter()
        float(metrics["loss"])
        ready_s = time.perf_counter()
        self._world.commit(step, self._state, metrics)
        return [
            ("batch", made_s),
            ("dispatch", dispatched_s),
            ("wait", ready_s),
            ("commit", time.perf_counter()),
        ], step

    def _next_batch(self) -> tuple[int, Any]:
        try:
            step, batch = next(self._engine_batches)
        except StopIteration:
            raise RuntimeError(
                "the topology was about to change: this measures one world, undisturbed"
            ) from None
        return step, batch


def time_batch_parts(mesh: Any, dataset: Any, global_batch: int, repeats: int) -> dict[str, list[float]]:
    """The engine's batch making without its journal: drawing the ids, and reading rows onto the devices."""
    import jax

    from elastic.data import BatchMaker
    from reshard.batches import sample_ids

    maker = BatchMaker(mesh, "data", dataset, global_batch, "weight")
    times: dict[str, list[float]] = {"sample_ids": [], "make": []}
    for index in range(repeats):
        began_s = time.perf_counter()
        ids, _ = sample_ids(0, index * global_batch, global_batch, len(dataset))
        drawn_s = time.perf_counter()
        jax.block_until_ready(maker.make(ids))
        times["sample_ids"].append(drawn_s - began_s)
        times["make"].append(time.perf_counter() - drawn_s)
    return times


@click.command()
@click.option(
    "--rounds", type=int, required=True, help="How often bare, wrapped and floor blocks take turns."
)
@click.option("--block", type=int, required=True, help="Counted steps of a block.")
@click.option(
    "--into", type=click.Path(path_type=Path), required=True, help="Folder for what each process measured."
)
def main(rounds: int, block: int, into: Path) -> None:
    """Run the schedule in the one world of this job, and write down what it took."""
    import jax

    import elastic
    from elastic.demo.model import DEMO, init_state, make_train_step, state_shardings
    from elastic.demo.text import TextWindows

    dataset = TextWindows(None, sequence_length=DEMO.sequence_length)
    with elastic.session() as session:
        for world in session.worlds():
            with world:
                mesh = world.mesh({"data": -1, "model": 2})
                state = world.restore(init_state, state_shardings(mesh))
                total = num_commits(rounds, block)
                engine_batches = iter(
                    world.batches(
                        dataset, global_batch=DEMO.global_batch, num_steps=total, weight_key="weight"
                    )
                )
                bare_batches = BareBatches(mesh, dataset, DEMO.global_batch)
                loop = Loop(world, state, make_train_step(mesh), bare_batches, engine_batches)
                del state
                rank = jax.process_index()
                engine_cpu = EngineCpu() if rank == 0 else None
                blocks = [loop.run_block(index, kind, block, engine_cpu) for index, kind in schedule(rounds)]
                if next(engine_batches, None) is not None:
                    raise RuntimeError("the schedule ended before the steps did")
                measured = {
                    "rank": rank,
                    "generation": world.generation,
                    "floor_bytes": loop.copy_and_hash.num_bytes,
                    "blocks": [asdict(measured_block) for measured_block in blocks],
                    "batch_parts_s": time_batch_parts(mesh, dataset, DEMO.global_batch, 3 * block),
                }
                (into / f"measured-{rank}.json").write_text(json.dumps(measured))
                del loop


if __name__ == "__main__":
    main()
