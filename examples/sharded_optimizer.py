"""Optimizer state that is sharded over the slices (ZeRO): each slice alone has its part of it.

The agents keep a copy of each part on another slice, so that a lost slice loses nothing:

elastic launch --devices-per-host 1 --replicas 2 --fault host:slice=1@step=20 -- examples/sharded_optimizer.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import elastic

STEPS, BATCH, WIDTH, RATE = 120, 96, 768, 0.01


class Waves:
    """A map-style data set: `len()`, and each sample a dict of arrays."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        x = np.random.default_rng(index).standard_normal(48, dtype=np.float32)
        return {"x": x, "y": np.sin(x.sum())}


def init():
    """A fresh state."""
    sizes = [(48, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [jax.random.normal(key, size) * size[0] ** -0.5 for key, size in zip(keys, sizes, strict=True)]
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


def loss_of(params, batch):
    """Mean squared error."""
    hidden = jnp.tanh(jnp.tanh(batch["x"] @ params[0]) @ params[1])
    return jnp.mean((hidden @ params[2] - batch["y"][:, None]) ** 2)


def train_step(state, batch):
    """One step of gradient descent with momentum."""
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
    params = jax.tree.map(lambda p, v: p - RATE * v, state["params"], velocity)
    return {"params": params, "velocity": velocity}, {"loss": loss}


with elastic.session() as session:
    for world in session.worlds():  # again at every change of topology
        with world:  # what is made on devices belongs in here
            mesh = world.mesh({"data": -1})
            everywhere = NamedSharding(mesh, PartitionSpec())
            # The first dim in parts over the slices; whole on each where it does not divide over them.
            specs = {"params": PartitionSpec(), "velocity": PartitionSpec("data")}
            shardings = world.shardings(specs, jax.eval_shape(init))
            state = world.restore(init, shardings)  # fresh at first, afterwards from snapshots
            step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, everywhere))
            for step, batch in world.batches(Waves(), global_batch=BATCH, num_steps=STEPS):
                state, metrics = step_fn(state, batch)
                world.commit(step, state, metrics)
