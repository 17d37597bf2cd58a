"""The peers' model in an ordinary loop under the engine: what bench_recovery kills slices of.

An MLP of 10.5 M parameters with Adam, 126 MB of state, 16 samples a slice and step with three slices: the
sizes, the batch and the loss of the scripts that measure the peers. With two slices the same 48 samples are
shared out (the peers go on with 32). Nothing in it is made for recoveries.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import elastic

INPUTS = 512
GLOBAL_BATCH = 48
NUM_SAMPLES = 4096
OPTIMIZER = optax.adam(1e-3)


class Noise:
    """A data set of random vectors, which the model learns to give back."""

    def __init__(self) -> None:
        self._vectors = np.random.default_rng(0).standard_normal((NUM_SAMPLES, INPUTS), np.float32)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray[Any, Any]]:
        return {"x": self._vectors[index]}


def init_state(width: int) -> dict[str, Any]:
    """Fresh weights of four layers, and Adam's two moments."""
    sizes = (INPUTS, width, width, width, INPUTS)
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    params = [
        {"w": jax.random.normal(key, (rows, columns)) / rows**0.5, "b": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes, sizes[1:], strict=False)
    ]
    return {"params": params, "opt": OPTIMIZER.init(params)}


def loss_of(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """The mean squared difference between the output and the input."""
    y = x
    for layer in params[:-1]:
        y = jax.nn.relu(y @ layer["w"] + layer["b"])
    y = y @ params[-1]["w"] + params[-1]["b"]
    return jnp.mean(jnp.square(y - x))


@jax.jit(donate_argnums=0)
def train_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One step of Adam."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch["x"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def main() -> None:
    """Train for `--steps` steps."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--steps", type=int, default=100)
    made.add_argument("--width", type=int, default=2048, help="2048 gives 10.5 M parameters")
    given = made.parse_args()
    data = Noise()
    with elastic.session() as session:
        for world in session.worlds():
            with world:
                mesh = world.mesh({"data": -1})
                everywhere = NamedSharding(mesh, PartitionSpec())
                state = world.restore(lambda: init_state(given.width), everywhere)
                for step, batch in world.batches(data, global_batch=GLOBAL_BATCH, num_steps=given.steps):
                    state, metrics = train_step(state, batch)
                    world.commit(step, state, metrics)


if __name__ == "__main__":
    main()
