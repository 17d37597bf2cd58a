"""Meshes of what is alive, and shardings that fit them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic.meshes import fitted_sharding, map_specs, mesh_of
from reshard.errors import UsageError

P = PartitionSpec


def mesh_on(num_devices: int, model: int = 2) -> jax.sharding.Mesh:
    return mesh_of(jax.devices()[:num_devices], {"data": -1, "model": model})[0]


def test_sharding_is_the_spec_where_every_dim_divides() -> None:
    mesh, spec = mesh_on(8), P("data", None, "model")
    assert fitted_sharding(mesh, "data", (8, 3, 4), spec) == NamedSharding(mesh, spec)


@pytest.mark.parametrize(
    ("shape", "spec", "fitted"),
    [
        ((8, 4), P("data", "model"), P(None, "model")),
        ((8, 4), P(("data", "model")), P("model")),
        ((8, 4), P(("model", "data"), None), P("model")),
        ((6, 8), P("model", "data"), P("model")),
        ((), P(), P()),
    ],
)
def test_sharding_replicates_over_the_axis_a_dim_that_does_not_divide(
    shape: tuple[int, ...], spec: PartitionSpec, fitted: PartitionSpec
) -> None:
    mesh = mesh_on(6)  # data=3
    sharding = fitted_sharding(mesh, "data", shape, spec)
    assert sharding == NamedSharding(mesh, fitted)
    jax.device_put(jnp.zeros(shape), sharding)  # JAX takes it


def test_sharding_keeps_its_memory_kind() -> None:
    sharding = fitted_sharding(mesh_on(6), "data", (8,), P("data"), memory_kind="unpinned_host")
    assert sharding.memory_kind == "unpinned_host"


def test_sharding_refuses_a_dim_that_another_axis_does_not_divide() -> None:
    with pytest.raises(UsageError, match=r"dim 1 \(3\) does not divide into 2, over model=2"):
        fitted_sharding(mesh_on(6), "data", (8, 3), P("data", "model"))
    with pytest.raises(UsageError, match="no axis 'stage'"):
        fitted_sharding(mesh_on(6), "data", (8,), P("stage"))


@pytest.mark.parametrize("num_devices", [6, 8])
def test_sharding_refuses_an_axis_named_twice_on_any_number_of_slices(num_devices: int) -> None:
    with pytest.raises(UsageError, match="uses a mesh axis twice"):
        fitted_sharding(mesh_on(num_devices), "data", (8, 8), P("data", "data"))


STATE = {"w": jnp.zeros((8, 4)), "opt": {"m": jnp.zeros((8, 4)), "count": jnp.zeros(())}}


@pytest.mark.parametrize(
    "specs",
    [
        {"w": P(None, "model"), "opt": {"m": P("data"), "count": P()}},
        lambda leaf: P("data") if leaf.shape == (8, 4) else P(),
    ],
)
def test_specs_of_a_state_may_be_a_tree_or_a_function(specs: Any) -> None:
    placed: Callable[..., Any] = map_specs(lambda shape, spec: (shape, spec), specs, STATE)  # type: ignore[arg-type]
    assert placed["opt"] == {"m": ((8, 4), P("data")), "count": ((), P())}  # type: ignore[index]


def test_specs_of_a_state_may_be_a_prefix_of_its_tree() -> None:
    shapes = jax.eval_shape(lambda: STATE)
    placed = map_specs(lambda shape, spec: (shape, spec), {"w": P("model"), "opt": P()}, shapes)
    assert placed == {"w": ((8, 4), P("model")), "opt": {"m": ((8, 4), P()), "count": ((), P())}}
