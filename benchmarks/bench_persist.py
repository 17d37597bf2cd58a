"""How long until a snapshot is durable in the persistent tier, and how long to read it back?

The state is in 100 float32 arrays on a mesh of 4 x 2, in one slot of host memory. Ours is the writer process,
from its start to the end of the finish; the peer is Orbax in this process with its compression off. The bound
is one thread that writes the same bytes into one file of the same file system, or reads them back.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import orbax.checkpoint as ocp
from figures import spread
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from machine import RUNS, fail, hand_over, is_quiet, load1, parser

from reshard.boxes import full_box, relative_slices
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.describe import describe_tree
from snapshot.manifest import make_static
from snapshot.persist import begin
from snapshot.persist_format import PersistFacts
from snapshot.persist_jobs import Done, FinishJob, WriteJob
from snapshot.persist_process import WriterProcess
from snapshot.persist_source import PersistentSource
from snapshot.slot import write_slot
from snapshot.tree import layout_of

HOST = HostId(0)
COLUMNS = 1728
WAYS = ("plain_write", "ours_write", "orbax_write", "plain_read", "ours_read")


def options() -> Namespace:
    made = parser(__doc__ or "", "persist.json")
    made.add_argument("--mib", type=int, default=None, help="size of the state (default 1024; smoke 8)")
    made.add_argument("--leaves", type=int, default=None, help="number of arrays (default 100; smoke 4)")
    made.add_argument("--runs", type=int, default=None, help="of each way, alternating (default 5; smoke 1)")
    made.add_argument(
        "--dir", type=Path, default=RUNS, help="where the scratch folder goes (default: %(default)s)"
    )
    given = made.parse_args()
    given.mib = given.mib or (8 if given.smoke else 1024)
    given.leaves = given.leaves or (4 if given.smoke else 100)
    given.runs = given.runs or (1 if given.smoke else 5)
    return given


def make_state(mib: int, num_leaves: int) -> tuple[dict[str, Any], Layout]:
    """Return arrays of random floats on the mesh, and their layout."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    rows = max(4, round(mib * 2**20 / num_leaves / 4 / COLUMNS / 4) * 4)
    random = np.random.default_rng(0)
    state = {
        f"layer{index:03}": jax.device_put(random.standard_normal((rows, COLUMNS), np.float32), sharding)
        for index in range(num_leaves)
    }
    return state, layout_of(jax.block_until_ready(state), mesh, dict.fromkeys(range(8), HOST))


def make_slot(path: Path, state: dict[str, Any], layout: Layout) -> None:
    """Store the state in a slot, as the one host that has all of it."""
    shards = [(array.path, box) for array in layout.arrays for box in layout.boxes_by_host(array)[HOST]]
    leaves = dict(zip((array.path for array in layout.arrays), state.values(), strict=True))
    data = [
        np.ascontiguousarray(np.asarray(leaves[path])[relative_slices(box, full_box(leaves[path].shape))])
        for path, box in shards
    ]
    write_slot(path, make_static(HOST, layout, shards), [part.reshape(-1).view(np.uint8) for part in data],
               step=1, generation=1, position=0)  # fmt: skip


def plain_write(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), 16 << 20):
            file.write(data[start : start + (16 << 20)])
        os.fsync(file.fileno())


def plain_read(path: Path, out: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        while file.readinto(out):
            pass


def ours_write(root: Path, slot: Path, facts: PersistFacts) -> None:
    shards = tuple(
        (array.path, box) for array in facts.layout.arrays for box in facts.layout.boxes_by_host(array)[HOST]
    )
    staging = str(begin(root, 1, 1))
    for job in (
        WriteJob(staging=staging, slots=(str(slot),), step=1, generation=1, layout=facts.layout,
                 tree=facts.tree, shards=shards),
        FinishJob(root=str(root), staging=staging, facts=facts),
    ):  # fmt: skip
        result = WriterProcess(job).wait()
        if not isinstance(result, Done):
            fail(result.message)


def ours_read(path: Path, out: np.ndarray[Any, Any]) -> None:
    source = PersistentSource(path)
    requests, start = [], 0
    for array in source.arrays.values():
        requests.append((array.path, full_box(array.shape), out[start : start + array.nbytes]))
        start += array.nbytes
    source.read_into(requests)


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def measure(given: Namespace, scratch: Path, slot: Path) -> dict[str, list[float]]:
    state, layout = make_state(given.mib, given.leaves)
    make_slot(slot, state, layout)
    facts = PersistFacts(step=1, generation=1, position=0, layout=layout, tree=describe_tree(state))
    nbytes = sum(array.nbytes for array in layout.arrays)
    data = np.fromfile(slot, np.uint8, nbytes)
    out = np.zeros(nbytes, np.uint8)
    orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for run in range(given.runs + 1):  # the first one warms up
        root = scratch / f"run{run}"
        root.mkdir()
        taken = (
            timed(lambda root=root: plain_write(root / "plain", memoryview(data))),
            timed(lambda root=root: ours_write(root, slot, facts)),
            timed(lambda root=root: orbax.save(root / "orbax", args=ocp.args.PyTreeSave(state))),
            timed(lambda root=root: plain_read(root / "plain", memoryview(out))),
            timed(lambda root=root: ours_read(root / "1", out)),
        )
        shutil.rmtree(root)
        if run or given.smoke:
            for way, taken_s in zip(WAYS, taken, strict=True):
                times[way].append(taken_s)
    return times


def main() -> None:
    given = options()
    load_before = load1()
    given.dir.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=given.dir) as scratch,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as slot,
    ):
        times = measure(given, Path(scratch), Path(slot.name))
        file_system = "memory" if str(Path(scratch).resolve()).startswith("/dev/shm") else "disk"
    median_s = {way: statistics.median(taken) for way, taken in times.items()}
    write_s, read_s = median_s["plain_write"], median_s["plain_read"]
    print(f"bound  {write_s:.3f} s  one thread writes {given.mib} MiB into one file, fsync ({file_system})")
    print(f"ours   {median_s['ours_write'] / write_s:.2f} x  writer process start to durable, two processes")
    print(f"orbax  {median_s['orbax_write'] / write_s:.2f} x  save, compression off, in this process")
    print(f"bound  {read_s:.3f} s  one thread reads the file back")
    print(f"ours   {median_s['ours_read'] / read_s:.2f} x  all arrays into given buffers, CRC32C checked")
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        **{f"{way}_s": spread(taken).as_dict() for way, taken in times.items()},
        "ours_write_x": round(median_s["ours_write"] / write_s, 3),
        "orbax_write_x": round(median_s["orbax_write"] / write_s, 3),
        "ours_read_x": round(median_s["ours_read"] / read_s, 3),
        "mib": given.mib,
        "leaves": given.leaves,
        "file_system": file_system,
    }
    hand_over("persist", figures, given.json, smoke=given.smoke, load_before=load_before)


if __name__ == "__main__":
    main()
