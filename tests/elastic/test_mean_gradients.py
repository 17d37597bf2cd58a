"""Batches on a mesh, and the mean loss over them: the same whatever the padding and the micro-batches are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import elastic
from elastic.data import BatchMaker
from reshard.errors import UsageError

WIDTH = 5


class Points:
    """Samples that can be told apart."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = np.random.default_rng(index).standard_normal(WIDTH).astype(np.float32)
        return {"x": x, "id": np.int32(index)}


def maker(shards: int, global_batch: int, max_rows: int | None, weight_key: str | None = "w") -> BatchMaker:
    grid = np.array(jax.devices()[: 2 * shards]).reshape(shards, -1)
    return BatchMaker(Mesh(grid, ("data", "model")), "data", Points(), global_batch, weight_key, max_rows)


def params_of(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    params = {"a": jax.random.normal(keys[0], (WIDTH, 3)), "b": jax.random.normal(keys[1], (3,))}
    return jax.tree.map(lambda array: array.astype(dtype), params)


def losses_of(params: dict[str, jax.Array], rows: dict[str, jax.Array]) -> jax.Array:
    return jnp.square(jnp.tanh(rows["x"].astype(params["a"].dtype) @ params["a"]) @ params["b"] - 1)


def plain(params: dict[str, jax.Array], ids: np.ndarray[Any, Any]) -> tuple[jax.Array, Any]:
    """The mean over these samples and its gradients, on one device, without any splitting."""
    rows = {"x": np.stack([Points()[int(index)]["x"] for index in ids])}
    return jax.value_and_grad(lambda params: jnp.mean(losses_of(params, rows)))(params)


@pytest.mark.parametrize(
    ("shards", "global_batch", "max_rows", "micro_batches"),
    [(3, 12, None, None), (2, 13, None, None), (3, 12, 4, 1), (2, 12, 4, 2), (4, 13, 2, 2), (1, 7, 2, 4)],
)
def test_mean_and_gradients_are_those_of_the_whole_batch(
    shards: int, global_batch: int, max_rows: int | None, micro_batches: int | None
) -> None:
    ids, params = np.arange(100, 100 + global_batch), params_of()
    batch = maker(shards, global_batch, max_rows).make(ids)
    dims = batch["x"].shape[:-1]
    assert batch["w"].shape == batch["id"].shape == dims
    assert dims[:-1] == (() if micro_batches is None else (micro_batches,))
    assert max_rows is None or dims[-1] <= max_rows * shards
    assert sorted(np.asarray(batch["id"])[np.asarray(batch["w"]) == 1]) == ids.tolist()
    found = jax.jit(elastic.mean_value_and_grad(losses_of, weight_key="w"))(params, batch)
    # Sums in another order: a few units in the last place of float32.
    jax.tree.map(
        lambda f, p: np.testing.assert_allclose(f, p, rtol=1e-5, atol=1e-6), found, plain(params, ids)
    )


def test_micro_batch_holds_its_shard_of_rows_on_each_device() -> None:
    batch = maker(2, 12, 4).make(np.arange(12))
    for shard in batch["id"].addressable_shards:
        first = 6 if shard.index[1].start else 0
        assert np.asarray(shard.data).ravel().tolist() == list(range(first, first + 6))


def test_gradients_in_bfloat16_are_added_up_in_float32() -> None:
    ids = np.arange(1000)
    params, (exact, exact_gradients) = params_of(jnp.bfloat16), plain(params_of(), ids)
    batch = maker(1, len(ids), 1).make(ids)
    value, gradients = jax.jit(elastic.mean_value_and_grad(losses_of, weight_key="w"))(params, batch)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, exact, rtol=0.01)
    for name, gradient in gradients.items():
        assert gradient.dtype == jnp.bfloat16
        error = jnp.max(jnp.abs(gradient.astype(jnp.float32) - exact_gradients[name]))
        # One rounding of the parameters costs 1 %; a thousand roundings of the sum would cost over 10 %.
        assert error < 0.03 * jnp.max(jnp.abs(exact_gradients[name]))


@pytest.mark.parametrize("max_rows", [None, 2])
def test_fewer_samples_than_usual_come_in_the_usual_shape_and_compile_nothing(max_rows: int | None) -> None:
    usual = maker(2, 12, max_rows)
    mean = jax.jit(elastic.mean_value_and_grad(losses_of, weight_key="w"))
    params = params_of()
    for count in (12, 5, 1, 12):
        value, _ = mean(params, usual.make(np.arange(count)))
        np.testing.assert_allclose(value, plain(params, np.arange(count))[0], rtol=1e-5)
    assert mean._cache_size() == 1


def test_more_samples_than_usual_keep_the_bound_on_rows() -> None:
    batch = maker(2, 8, 4).make(np.arange(13))
    assert batch["x"].shape == (2, 2 * 4, WIDTH)
    assert batch["w"].sum() == 13


def test_rows_that_do_not_divide_need_a_weight() -> None:
    with pytest.raises(UsageError, match="13 does not divide over 2 replicas × 4 micro-batches"):
        maker(2, 13, 2, weight_key=None)
    assert "w" not in maker(2, 12, 3, weight_key=None).make(np.arange(12))


def test_mean_refuses_a_batch_without_weights_and_a_loss_that_is_no_row_of_losses() -> None:
    batch = maker(2, 12, 3).make(np.arange(12))
    with pytest.raises(UsageError, match="the batch has no 'weight'"):
        elastic.mean_value_and_grad(losses_of)(params_of(), batch)
    with pytest.raises(UsageError, match=r"returned \(\) for 6 rows"):
        elastic.mean_value_and_grad(lambda p, rows: jnp.mean(losses_of(p, rows)), weight_key="w")(
            params_of(), batch
        )
