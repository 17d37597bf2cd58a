"""The text of a training script with momentum, whose state is laid out as a test says.

A run that a lost slice is to come back to is held at one of its last steps until that slice's workers are at
their sessions: so it takes part in the steps after it, however long its start takes. One whose coordinator
dies is held at a step, where that is asked for, until the next one commands.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

STEPS_AFTER_HOLD = 40
"""At a slow pace until the slice has joined, which takes its host's room and a boundary two steps on."""
TRACES = "traces.txt"
"""In the run's directory: a line each time the step is traced, with the process, the slices and the time."""
HOLD_OPTIONS = ("--hang-after-s", "240")
"""What a job needs that may be held: for the step watchdog a held step hangs."""

_SCRIPT = """
    import os, pathlib, time
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    import elastic
    from elastic.records import CoordinatorStarted, WorkerEvent, of_kind, read_history

    HISTORY = pathlib.Path(os.environ["ELASTIC_DIR"]) / "events.jsonl"
    TRACES = HISTORY.with_name("{traces}")
    num_slices = 0

    class Points:
        def __len__(self):
            return 500
        def __getitem__(self, index):
            x = np.random.default_rng(index).standard_normal({num_rows}).astype(np.float32)
            return {{"x": x, "y": x[:{num_columns}] - x[{num_columns}:{num_columns} * 2]}}

    def init():
        w = jnp.zeros(({num_rows}, {num_columns}), jnp.float32)
        return {{"w": w, "m": jnp.zeros_like(w), "n": jnp.zeros((), jnp.int32)}}

    def step_fn(state, batch):
        with TRACES.open("a") as told:
            print(os.getpid(), num_slices, time.time(), file=told)
        def loss_of(w):
            return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
        loss, gradient = jax.value_and_grad(loss_of)(state["w"])
        m = 0.9 * state["m"] + gradient
        return {{"w": state["w"] - 0.001 * m, "m": m, "n": state["n"] + 1}}, {{"loss": loss}}

    def num_ready():
        states = [event.state for event in of_kind(read_history(HISTORY), WorkerEvent)]
        # On a busy machine a survivor may be replaced.
        return states.count("ready") - states.count("respawned")

    def num_coordinators():
        return len(of_kind(read_history(HISTORY), CoordinatorStarted))

    def has_copies(world):
        (arena,) = world._link.arenas().values()
        return len(arena.manifests().complete) > len(arena.captured().complete)

    with elastic.session() as session:
        for world in session.worlds():
            with world:
                num_slices = len(world.slices)
                world.mesh({axes})
                placed = world.shardings({specs}, jax.eval_shape(init))
                state = world.restore(init, placed)
                step = jax.jit(step_fn, donate_argnums=0, out_shardings=(placed, None))
                for number, batch in world.batches(
                    Points(), global_batch=24, num_steps={steps}, batch_axis="data"
                ):
                    while number == {copied_before} and not has_copies(world):
                        time.sleep(0.05)
                    while number == {takeover_before} and num_coordinators() < 2:
                        time.sleep(0.05)
                    while number == {steps} - {after_hold} and num_ready() < {held_until_ready}:
                        time.sleep(0.05)
                    if number >= {steps} - {after_hold} and len(world.slices) < {num_slices_at_end}:
                        time.sleep(0.1)
                    state, metrics = step(state, batch)
                    world.commit(number, state, metrics)
"""


def write_script(
    directory: Path,
    *,
    num_rows: int,
    num_columns: int,
    axes: str,
    specs: str,
    steps: int,
    held_until_ready: int = 0,
    num_slices_at_end: int = 0,
    takeover_before: int = -1,
    copied_before: int = -1,
) -> Path:
    """Write the script; `axes` and `specs` are Python. `held_until_ready`: so many times in the run a worker
    has to have come to its session before the last steps are made, slowly until so many slices make them.
    `takeover_before`: the step that waits for a second coordinator; `copied_before`: the one that waits until
    each host keeps a copy of another's part of the state.
    """
    directory.mkdir(exist_ok=True)
    path = directory / "train.py"
    path.write_text(
        textwrap.dedent(_SCRIPT).format(
            num_rows=num_rows,
            num_columns=num_columns,
            axes=axes,
            specs=specs,
            steps=steps,
            after_hold=STEPS_AFTER_HOLD,
            traces=TRACES,
            held_until_ready=held_until_ready,
            num_slices_at_end=num_slices_at_end,
            takeover_before=takeover_before,
            copied_before=copied_before,
        )
    )
    return path
