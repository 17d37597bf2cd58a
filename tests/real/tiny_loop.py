"""A small training script whose pace a test sets by files in the folder that is its argument.

It waits at step GATE for the file `go`, and makes a step each PACE_S until there is the file `enough`, in
which the number of the last step may stand.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import elastic

FOLDER, STEPS, GATE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
PACE_S = 0.02
WIDTH = 64


class Waves:
    """Samples that are made when they are asked for."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = np.random.default_rng(index).standard_normal(WIDTH, dtype=np.float32)
        return {"x": x, "y": np.sin(x.sum())}


def init() -> Any:
    """A fresh state."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) * WIDTH**-0.5 for key in keys]
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


def loss_of(params: Any, batch: Any) -> Any:
    """Mean squared error."""
    hidden = batch["x"]
    for weights in params:
        hidden = jnp.tanh(hidden @ weights)
    return jnp.mean((hidden.sum(1) - batch["y"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    """One step with momentum."""
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda p, v: p - 0.01 * v, state["params"], velocity)
    return {"params": params, "velocity": velocity}, {"loss": loss}


def last_step() -> int | None:
    """The last step, where it is set by now."""
    try:
        return int((FOLDER / "enough").read_text() or STEPS)
    except FileNotFoundError:
        return None


with elastic.session() as session:
    for world in session.worlds():
        with world:
            everywhere = NamedSharding(world.mesh({"data": -1}), PartitionSpec())
            state = world.restore(init, everywhere)
            step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(everywhere, None))
            for step, batch in world.batches(Waves(), global_batch=12, num_steps=STEPS):
                while step == GATE and not (FOLDER / "go").exists():
                    time.sleep(0.01)
                if last_step() is None:
                    time.sleep(PACE_S)
                state, metrics = step_fn(state, batch)
                world.commit(step, state, metrics)
                if step == last_step():
                    break
