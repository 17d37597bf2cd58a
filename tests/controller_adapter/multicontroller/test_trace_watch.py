import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from controller_adapter.multicontroller import jax_private
from controller_adapter.multicontroller.trace_watch import names_devices


def everywhere() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())


def test_program_of_shapes_alone_names_no_devices():
    def loss(w, x):
        return jnp.mean(jax.nn.relu(x @ w) ** 2)

    def step(w, x):
        return jax.lax.scan(lambda c, row: (c - jax.grad(loss)(c, row[None]), row.sum()), w, x)

    assert not names_devices(jax.make_jaxpr(jax.jit(step))(jnp.ones((4, 4)), jnp.ones((3, 4))))


def test_constraint_on_a_mesh_names_its_devices_however_deep():
    sharding = everywhere()

    def inner(carry, x):
        return jax.lax.with_sharding_constraint(carry + x, sharding), None

    traced = jax.make_jaxpr(jax.jit(lambda x: jax.lax.scan(inner, x[0], x)))(jnp.ones((3, 4)))
    assert names_devices(traced)


def test_inner_program_with_shardings_of_its_own_names_devices():
    inner = jax.jit(lambda x: x * 2, in_shardings=everywhere())
    assert names_devices(jax.make_jaxpr(jax.jit(lambda x: inner(x) + 1))(jnp.ones(4)))


def test_array_that_a_function_closes_over_is_on_devices():
    held = jnp.arange(4.0)
    assert names_devices(jax.make_jaxpr(lambda x: x + held)(jnp.ones(4)))


def test_traces_are_kept_until_one_that_names_devices_is_called(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax_private, "_kept_traces", {"trace_to_jaxpr"})
    monkeypatch.setattr(jax_private.pjit, "_infer_params", jax_private.pjit._infer_params)
    jax_private.watch_traces()
    jax.jit(lambda x: jnp.where(x > 0, x, -x))(np.ones(4))
    assert jax_private._kept_traces
    sharding = everywhere()
    jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))(np.ones(4))
    assert not jax_private._kept_traces
