"""Plays worlds of several processes alone, then computes as usual: prints what was traced, what came out."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

from controller_adapter.multicontroller import jax_private, jax_solo

num_traces = 0


def init():
    return {"w": jnp.ones((64, 64)), "key": jax.random.key(0), "b": jnp.ones(4, jnp.bfloat16)}


def step(state, x):
    global num_traces
    num_traces += 1
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {**state, "w": state["w"] - 0.1 * gradient}, loss


def train(num_hosts: int) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(num_hosts, -1), ("data", "model"))
    everywhere, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    state = jax.jit(init, out_shardings=everywhere)()
    x = jax.make_array_from_callback((12, 64), rows, lambda index: np.ones((12, 64), np.float32)[index])
    update = jax.jit(step, donate_argnums=0)
    for _ in range(3):  # the second and third time, JAX would take a shorter way
        state, loss = update(state, x)
    multihost_utils.sync_global_devices("all")
    compiled = jax.jit(step).lower(state, x).compile()
    loss = compiled(state, x)[1] + loss
    own = float(np.asarray(loss.addressable_data(0)))
    kinds = (
        str(state["key"].dtype),
        str(state["b"].dtype),
        state["w"].sharding.is_equivalent_to(everywhere, 2),
    )
    print(num_hosts, len(jax.devices()), jax.process_count(), own > 0, *kinds, num_traces, flush=True)


jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax_private.bind_collectives("127.0.0.1")
jax_private.share_compile_cache()
jax_private.watch_traces()
for num_hosts in (3, 2, 3, 2):
    with jax_solo.solo(num_hosts, 2):
        train(num_hosts)
    gc.collect()
    print("alive", sum(isinstance(found, _jax.Client) for found in gc.get_objects()), flush=True)
jax.config.update("jax_cpu_collectives_implementation", None)
train(1)
