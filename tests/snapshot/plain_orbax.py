"""Restores a persisted snapshot with plain Orbax, in a process that cannot import this project.

Run with `-I`: <root> <step> <damaged roots…>. Prints {way: {path: [dtype, shape, sha256]}} as JSON.
"""

import sys


class Guard:
    """Hides this project, which may be installed in this environment."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("reshard", "snapshot", "elastic", "controller_adapter", "chaos"):
            raise ImportError(f"{name} is not here")


sys.meta_path.insert(0, Guard())
for name in ("snapshot", "reshard", "elastic"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} can be imported: this proves nothing")

import dataclasses
import hashlib
import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=6"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Loop:
    count: jax.Array
    rate: float


def target(mesh):
    def struct(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    rows = dict.fromkeys(("float32", "int8", "float8", "int4", "uint2"), ("rows",))
    dtypes = {
        "float32": "float32",
        "bfloat16": "bfloat16",
        "int8": "int8",
        "bool": "bool",
        "float8": "float8_e4m3fn",
        "int4": "int4",
        "uint2": "uint8",  # TensorStore has no uint2
        "float4": "float4_e2m1fn",
        "complex": "complex64",
    }
    state = {name: struct((24, 4), jnp.dtype(dtype), *rows.get(name, ())) for name, dtype in dtypes.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="rbg"), 24))
    params = {"w": struct((24, 4), jnp.float32, "rows"), "b.c/d": struct((24, 4), jnp.bfloat16)}
    moments = jax.tree.map(
        lambda leaf: struct(leaf.shape, leaf.dtype), jax.eval_shape(optax.adam(0.1).init, params)
    )
    state |= {
        "nan": struct((4,), jnp.float32),
        "scalar": struct((), jnp.float32),
        "empty": struct((0, 4), jnp.float32),
        "key": struct(key.shape, key.dtype),
        "keys": struct(keys.shape, keys.dtype, "rows"),
        "single": struct((), jnp.int32),
        "numpy": np.zeros((2, 3), np.uint16),
        "numpy_scalar": np.float64(0),
        "int": 0,
        "float": 0.0,
        "flag": False,
        "params": params,
        "opt": moments,
        "list": [struct((), jnp.float32), (struct((24, 4), jnp.bool_, "rows"), None, ())],
        "nothing": {},
        "loop": Loop(struct((), jnp.int32), 0.0),
    }
    return state


def digests(tree, expected_structure=None, num_devices=None):
    if expected_structure is not None:
        assert jax.tree.structure(tree) == expected_structure, jax.tree.structure(tree)
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Array):
            assert num_devices is None or leaf.sharding.num_devices == num_devices
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
        value = np.asarray(leaf)
        content = [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        found[jax.tree_util.keystr(path)] = content
    return found


def main():
    root, step = sys.argv[1], int(sys.argv[2])
    results = {}
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [step], manager.all_steps()
        assert manager.latest_step() == step
        for num_devices in (6, 1):
            wanted = target(Mesh(np.array(jax.devices()[:num_devices]), ("rows",)))
            structure = jax.tree.structure(wanted)
            state = manager.restore(step, args=ocp.args.StandardRestore(wanted))
            results[f"manager on {num_devices}"] = digests(state, structure, num_devices)
        results["manager without a target"] = digests(manager.restore(step))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(f"{root}/{step}/default", wanted)
        results["checkpointer"] = digests(state, structure)
    results["v1"] = digests(v1.load(f"{root}/{step}", wanted), structure)
    results["v1 without a target"] = digests(v1.load(f"{root}/{step}"))
    for damaged in sys.argv[3:]:
        with ocp.CheckpointManager(damaged) as manager:
            try:
                manager.restore(step)
            except Exception as error:
                results[damaged] = "params.w" in str(error)
    print(json.dumps(results), flush=True)
    os._exit(0)  # after a failed restore Orbax leaves threads that complain at the end of the interpreter


main()
