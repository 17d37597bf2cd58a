"""A device never has more rows in memory than with all slices: the batch comes in micro-batches.

With three slices a step is one micro-batch of 32 rows a device; with two it is two of 24, and the mean is
over the same 96 samples. The gradients of the micro-batches are added up:

elastic launch --devices-per-host 1 --fault kill:slice=1@step=20 -- examples/micro_batches.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import elastic

STEPS, BATCH, MAX_ROWS, WIDTH = 120, 96, 32, 512
OPTIMIZER = optax.adamw(1e-3)


class Waves:
    """A map-style data set: `len()`, and each sample a dict of arrays."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        x = np.random.default_rng(index).standard_normal(16, dtype=np.float32)
        return {"x": x, "y": np.sin(x.sum())}


def init():
    """A fresh state."""
    sizes = [(16, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [jax.random.normal(key, size) * size[0] ** -0.5 for key, size in zip(keys, sizes, strict=True)]
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def losses_of(params, rows):
    """The squared error of each row: shape `[rows]`."""
    hidden = jnp.tanh(jnp.tanh(rows["x"] @ params[0]) @ params[1])
    return jnp.square((hidden @ params[2])[:, 0] - rows["y"])


def train_step(state, batch):
    """One step; `batch` holds arrays `[micro-batches, rows, ...]`."""
    loss, gradients = elastic.mean_value_and_grad(losses_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer}, {"loss": loss}


with elastic.session() as session:
    for world in session.worlds():  # again at every change of topology
        with world:  # what is made on devices belongs in here
            everywhere = NamedSharding(world.mesh({"data": -1}), PartitionSpec())
            state = world.restore(init, everywhere)  # fresh at first, afterwards from snapshots
            step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=everywhere)
            batches = world.batches(
                Waves(),
                global_batch=BATCH,
                max_rows_per_device=MAX_ROWS,
                weight_key="weight",
                num_steps=STEPS,
            )
            for step, batch in batches:
                state, metrics = step_fn(state, batch)
                world.commit(step, state, metrics)
