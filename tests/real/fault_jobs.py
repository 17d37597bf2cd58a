"""A job for faults: every result of it is exact, so that its final state tells whether a step or a sample was
lost or repeated, whatever happened on the way; and it goes on until all that was asked for has happened.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from real_runs import BOUND_S, Run, finish, left_behind, processes_naming, start

from elastic.records import FaultInjected, PhaseEntered, Record, WorldFormed, of_kind, read_history
from reshard.errors import UsageError

STEPS = 500
PACE_S = 0.25
"""How long a step takes until all faults have happened: the processors are for who starts and recovers."""
SCRIPT = """
import pathlib, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import elastic

OVER = pathlib.Path(OVER_PATH)
# Integers: their sum is the same bits in whatever order, on however many slices.
dataset = [{"x": np.array([index, index * index], np.int32)} for index in range(997)]


def initial():
    w = jnp.zeros((64, 64), jnp.int32)
    return {"sum": jnp.zeros(2, jnp.int32), "steps": jnp.zeros((), jnp.int32), "w": w}


def update(state, x):
    total = x.sum(axis=0)
    grid = jnp.outer(jnp.arange(64, dtype=jnp.int32), jnp.arange(64, dtype=jnp.int32)) % 7
    w = state["w"] + grid * total[0]
    return {"sum": state["sum"] + total, "steps": state["steps"] + 1, "w": w}, total[0]


with elastic.session() as session:
    for world in session.worlds():
        with world:
            mesh = world.mesh({"data": -1})
            state = world.restore(initial, NamedSharding(mesh, P()))
            step_fn = jax.jit(update, donate_argnums=0)
            for step, batch in world.batches(dataset, global_batch=24, num_steps=NUM_STEPS):
                state, loss = step_fn(state, batch["x"])
                if not OVER.exists():
                    time.sleep(PACE)
                world.commit(step, state, {"loss": loss})
"""


class Watch:
    """Looks on until all faults have struck and the world is whole, then lets the job come to its end."""

    def __init__(self, directory: Path, over: Path, num_faults: int, slices: int) -> None:
        self._directory, self.over = directory, over
        self._num_faults, self._slices = num_faults, slices
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            if self._is_over():
                self.over.touch()
                return

    def _is_over(self) -> bool:
        try:
            records = list(read_history(self._directory / "events.jsonl"))
        except (OSError, UsageError):
            return False
        struck = {record.detail for record in of_kind(records, FaultInjected)}
        if len(struck) < self._num_faults:
            return False
        last = max((record.unix_s for record in of_kind(records, FaultInjected)), default=0.0)
        worlds, phases = of_kind(records, WorldFormed), of_kind(records, PhaseEntered)
        if not worlds:
            return False
        is_whole = len(worlds[-1].slices) == self._slices and phases[-1].phase == "RUNNING"
        return is_whole and records[-1].unix_s > last + SETTLE_S


NEVER = 1 << 30
SETTLE_S = 3.0
"""What a fault leads to has begun by then."""


def launch(
    tmp_path: Path,
    faults: Sequence[str],
    *options: str,
    slices: int = 3,
    steps: int = STEPS,
    pace_s: float = PACE_S,
    prefix: Sequence[str] = (),
    watched: bool = True,
) -> tuple[subprocess.Popen[str], Path, Watch]:
    """Start the job with these faults, in the background; unless `watched`, the caller touches `over`."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    script, out, over = tmp_path / "train.py", tmp_path / "run", tmp_path / "over"
    text = SCRIPT.replace("OVER_PATH", repr(str(over))).replace("PACE", str(pace_s))
    script.write_text(text.replace("NUM_STEPS", str(steps)))
    wanted = [word for fault in faults for word in ("--fault", fault)]
    arguments = ["--slices", str(slices), "--rejoin-after-steps", "0", *wanted, *options]
    process = start(out, "launch", "--out", str(out), *arguments, "--", str(script), prefix=prefix)
    return process, out, Watch(out, over, len(faults) if watched else NEVER, slices)


def run_with(
    tmp_path: Path, faults: Sequence[str], *options: str, slices: int = 3, timeout_s: float = BOUND_S
) -> Run:
    """Run the job with these faults to its end."""
    process, out, watch = launch(tmp_path, faults, *options, slices=slices)
    try:
        return finish(process, out, timeout_s=timeout_s)
    finally:
        watch.close()


def wait_records(
    directory: Path, condition: Callable[[list[Record]], object], bound_s: float = BOUND_S
) -> list[Record]:
    """Wait until the history of a run is so; returns it."""
    deadline_s = time.monotonic() + bound_s
    waiting = threading.Event()
    while True:
        records: list[Record] = []
        with contextlib.suppress(OSError, UsageError):
            records = list(read_history(directory / "events.jsonl"))
        if condition(records):
            return records
        assert time.monotonic() < deadline_s, f"not so within {bound_s} s: {records[-5:]}"
        waiting.wait(0.1)


def assert_survived(run: Run, digest: str, steps: int = STEPS) -> None:
    """Every fault happened, every promise was held, the state is that of an undisturbed run, bit for bit, and
    nothing is left.
    """
    assert run.status == 0, run.output
    report = run.report
    assert report.faults_missed == ()
    assert (report.run.outcome, report.steps.committed) == ("completed", steps)
    assert (report.steps.lost, report.steps.repeated) == (0, 0)
    assert (report.samples.lost, report.samples.repeated) == (0, 0)
    assert set(report.invariants.values()) == {"held"}, report.invariants
    assert report.final.state_digest == digest
    assert left_behind(report.run.id) == []
    assert processes_naming(str(run.directory)) == []


__all__ = ["wait_records", "Watch", "assert_survived", "launch", "run_with"]
