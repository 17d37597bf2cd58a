"""One of two processes that go through worlds: prints how many backends are alive after each was dropped.

Arguments: rank, and the address of each world's service.
"""

import gc
import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

from controller_adapter.multicontroller import jax_private

NUM_PROCESSES = 2
TIMEOUT_S = 30


def main(rank: int, addresses: list[str]) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax_private.share_compile_cache()
    for world, address in enumerate(addresses):
        service = jax_private.start_service(address, NUM_PROCESSES) if rank == 0 else None
        jax_private.connect(address, rank, NUM_PROCESSES, TIMEOUT_S)
        train(world)
        jax_private.put_and_collect("done", "", rank, NUM_PROCESSES, TIMEOUT_S * 1000)
        jax_private.drop_backend()
        gc.collect()
        print("traced", num_traces, flush=True)
        print("alive", sum(isinstance(found, _jax.Client) for found in gc.get_objects()), flush=True)
        kept.append(service)  # until both have left it


def train(world: int) -> None:
    """Run a program of this world's own."""
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    whole = jax.make_array_from_callback((8,), everywhere, lambda index: np.ones(8)[index])
    jax.jit(lambda x: x * (world + 2), out_shardings=everywhere)(whole).block_until_ready()
    double(whole).block_until_ready()
    jax.jit(treble, out_shardings=everywhere)(whole).block_until_ready()


num_traces = 0


@jax.jit
def double(x: jax.Array) -> jax.Array:
    """A program that every world runs."""
    global num_traces
    num_traces += 1
    return x.sum() * 2


def treble(x: jax.Array) -> jax.Array:
    """Another one, jitted in each world with shardings that name its devices."""
    global num_traces
    num_traces += 1
    return x.sum() * 3


kept: list[object] = []
main(int(sys.argv[1]), sys.argv[2:])
sys.stdout.flush()
sys.stdin.read()  # the other process needs the services until it has dropped its last backend
os._exit(0)
