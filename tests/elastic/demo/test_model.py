"""The demo's model: shapes, shardings, learning, and padding that changes nothing."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from elastic.demo.model import (
    DEMO,
    ModelConfig,
    _logits,
    abstract_state,
    batch_shardings,
    init_state,
    loss_of,
    make_train_step,
    state_shardings,
)

TINY = ModelConfig(num_layers=2, width=16, num_heads=2, hidden=32, sequence_length=8, learning_rate=1e-2)


def mesh_of_one() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def batch_of(rows: int, *, seed: int = 0, config: ModelConfig = TINY) -> dict[str, Any]:
    tokens = np.random.default_rng(seed).integers(97, 101, (rows, config.sequence_length + 1), dtype=np.int32)
    return {"tokens": tokens, "weight": np.ones(rows, np.float32)}


def leaves_of(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_demo_model_has_about_a_million_parameters_in_few_leaves() -> None:
    params = jax.tree.leaves(abstract_state()["params"])

    assert 0.8e6 < sum(np.prod(leaf.shape) for leaf in params) < 1.2e6
    assert len(jax.tree.leaves(abstract_state())) <= 20


def test_init_state_matches_abstract_state_and_shardings_in_structure() -> None:
    state = init_state(0, TINY)

    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), abstract_state(TINY))
    assert jax.tree.structure(state) == jax.tree.structure(state_shardings(mesh_of_one(), TINY))


def test_init_state_depends_on_the_seed_only() -> None:
    same, again, other = (leaves_of(init_state(seed, TINY)["params"]) for seed in (3, 3, 4))

    assert all(np.array_equal(a, b) for a, b in zip(same, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(same, other, strict=True))


def test_state_shardings_give_adam_moments_the_sharding_of_their_parameter() -> None:
    shardings = state_shardings(mesh_of_one(), TINY)

    moments = shardings["opt"][0]
    assert moments.mu == moments.nu == shardings["params"]
    assert "model" in shardings["params"]["inward"].spec
    assert not any(shardings["step"].spec)


def test_initial_loss_is_that_of_guessing() -> None:
    loss = loss_of(init_state(0)["params"], batch_of(4, config=DEMO))

    assert loss == pytest.approx(np.log(256), rel=0.05)


def test_train_step_lowers_the_loss_counts_and_donates() -> None:
    mesh = mesh_of_one()
    step = make_train_step(mesh, TINY)
    state = jax.device_put(init_state(0, TINY), state_shardings(mesh, TINY))
    batch = jax.device_put(batch_of(8), batch_shardings(mesh))
    given, losses = state, []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))

    assert losses[-1] < 1.5 < 5.0 < losses[0]
    assert int(state["step"]) == 30
    assert given["params"]["inward"].is_deleted()


def test_train_step_is_bit_identical_when_repeated() -> None:
    mesh = mesh_of_one()
    step = make_train_step(mesh, TINY)

    def run() -> list[np.ndarray]:
        state = jax.device_put(init_state(0, TINY), state_shardings(mesh, TINY))
        for seed in range(3):
            state, _ = step(state, batch_of(8, seed=seed))
        return leaves_of(state)

    assert all(np.array_equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_loss_ignores_the_bytes_of_rows_without_weight() -> None:
    params = init_state(0, TINY)["params"]
    batch = batch_of(6)
    batch["weight"][4:] = 0
    garbage = {**batch, "tokens": batch["tokens"].copy()}
    garbage["tokens"][4:] = 255
    grad = jax.jit(jax.value_and_grad(loss_of))

    expected, found = leaves_of(grad(params, batch)), leaves_of(grad(params, garbage))
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_loss_of_padded_batch_is_that_of_its_real_rows() -> None:
    params = init_state(0, TINY)["params"]
    padded = batch_of(6)
    padded["weight"][4:] = 0
    real = {name: rows[:4] for name, rows in padded.items()}

    loss_padded, gradient_padded = jax.value_and_grad(loss_of)(params, padded)
    loss_real, gradient_real = jax.value_and_grad(loss_of)(params, real)

    assert loss_padded == pytest.approx(float(loss_real), rel=1e-6)
    for a, b in zip(leaves_of(gradient_padded), leaves_of(gradient_real), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_loss_is_the_weighted_mean_of_row_losses() -> None:
    params = init_state(0, TINY)["params"]
    batch = batch_of(3)
    rows = [float(loss_of(params, {name: x[i : i + 1] for name, x in batch.items()})) for i in range(3)]
    batch["weight"] = np.array([1.0, 2.0, 0.5], np.float32)

    assert loss_of(params, batch) == pytest.approx(np.average(rows, weights=batch["weight"]), rel=1e-5)


def test_logits_see_no_byte_ahead() -> None:
    params = init_state(0, TINY)["params"]
    one_hot = np.eye(256, dtype=np.float32)[batch_of(1)["tokens"][:, :-1]]
    changed = one_hot.copy()
    changed[0, 5:] = np.roll(one_hot[0, 5:], 7, axis=-1)

    before, after = (np.asarray(_logits(params, inputs))[0] for inputs in (one_hot, changed))

    np.testing.assert_allclose(before[:5], after[:5], rtol=1e-5, atol=1e-6)
    assert np.abs(before[5:] - after[5:]).max(axis=-1).min() > 1e-3


@pytest.mark.parametrize("bad", [{"width": 10, "num_heads": 4}, {"hidden": 10, "num_heads": 4}])
def test_model_config_refuses_sizes_the_heads_cannot_share(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must divide by num_heads"):
        ModelConfig(**bad)
