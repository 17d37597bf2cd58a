"""Trains a byte-level transformer of about one million parameters: the workload of `elastic demo`.

Recovery traces and lowers the step again, so the step is kept cheap to trace, not only to run: the
layers are stacked and scanned, the tree has few leaves, and the operations are `jax.lax` primitives
(every `jnp` operator traces a nested jit; with them the trace took more than twice as long).

Parallel in two ways: the batch over the mesh axis "data" (between slices), and within a slice over
"model" in the Megatron manner (heads and hidden units split, one sum after each half of a layer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = [
    "DEMO",
    "ModelConfig",
    "abstract_state",
    "batch_shardings",
    "init_state",
    "loss_of",
    "make_train_step",
    "state_shardings",
    "train_step",
]

VOCABULARY = 256  # bytes

State = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the model, its optimiser and its batch; the defaults are the demo's."""

    num_layers: int = 2
    width: int = 192
    num_heads: int = 4
    hidden: int = 768
    sequence_length: int = 16
    global_batch: int = 48
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse sizes that the heads cannot share evenly."""
        for name in ("width", "hidden"):
            if getattr(self, name) % self.num_heads:
                raise ValueError(f"{name} must divide by num_heads {self.num_heads}")


DEMO = ModelConfig()

# Layers are stacked along the first dimension. What belongs to a head stands together, so that "model" splits
# heads: `inward` (layer, width, head, q | k | v | hidden), `outward` (layer, head, attended | hidden, width).
PARAM_SPECS = {
    "embed": PartitionSpec(),
    "position": PartitionSpec(),
    "inward": PartitionSpec(None, None, "model", None),
    "outward": PartitionSpec(None, "model", None, None),
}


def _param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    layers, width, heads = config.num_layers, config.width, config.num_heads
    head_width, head_hidden = width // heads, config.hidden // heads
    return {
        "embed": (VOCABULARY, width),
        "position": (config.sequence_length, width),
        "inward": (layers, width, heads, 3 * head_width + head_hidden),
        "outward": (layers, heads, head_width + head_hidden, width),
    }


@lru_cache(maxsize=4)
def _optimizer(config: ModelConfig) -> optax.GradientTransformation:
    return optax.adam(config.learning_rate, b1=0.9, b2=0.95)


@lru_cache(maxsize=4)
def abstract_state(config: ModelConfig = DEMO) -> State:
    """The state's tree with a `jax.ShapeDtypeStruct` in place of each array; made once a process."""
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in _param_shapes(config).items()}
    opt = jax.eval_shape(_optimizer(config).init, params)
    # Cached here, not in JAX: `jax.clear_caches()` during a recovery does not throw it away.
    return {"params": params, "opt": opt, "step": jax.ShapeDtypeStruct((), np.int32)}


def init_state(seed: int = 0, config: ModelConfig = DEMO) -> State:
    """A fresh state `{"params", "opt", "step"}` as host (NumPy) arrays, a function of `seed` alone.

    Made on the host so that it costs no compilation and is the same on every mesh and JAX version;
    place it with `jax.device_put`, `jax.make_array_from_callback` or a jit with `out_shardings`.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    scales = {
        "embed": 0.02,
        "position": 0.02,
        "inward": config.width**-0.5,
        # Keeps the sum over all layers at unit size.
        "outward": (2 * config.num_layers * config.width) ** -0.5,
    }
    state: State = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_state(config))
    for name, shape in _param_shapes(config).items():
        state["params"][name] = np.float32(scales[name]) * rng.standard_normal(shape, dtype=np.float32)
    # The queries start small, in place of a division of every score by sqrt(head width) in each step.
    head_width = config.width // config.num_heads
    state["params"]["inward"][..., :head_width] *= np.float32(head_width**-0.5)
    return state


def state_shardings(mesh: Mesh, config: ModelConfig = DEMO) -> State:
    """The state's tree with a `NamedSharding` in place of each array; `mesh` has axes "data" and "model"."""

    def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
        name: str = getattr(path[-1], "key", "")  # Adam's moments end in the name of their parameter
        return NamedSharding(mesh, PARAM_SPECS.get(name, PartitionSpec()))

    tree: State = jax.tree_util.tree_map_with_path(sharding, abstract_state(config))
    return tree


def batch_shardings(mesh: Mesh) -> Batch:
    """Shardings of a batch: rows over "data"."""
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return {"tokens": rows, "weight": rows}


def _spread(row: Any, like: Any) -> Any:
    """Repeat a row's statistic along the last dimension of `like`."""
    return lax.broadcast_in_dim(row, like.shape, tuple(range(row.ndim)))


def _dot(x: Any, weights: Any, x_dims: tuple[int, ...], weight_dims: tuple[int, ...]) -> Any:
    return lax.dot_general(x, weights, ((x_dims, weight_dims), ((), ())))


def _normalise(x: Any) -> Any:
    """Scale each row to unit root mean square (RMSNorm without a gain; arXiv:1910.07467)."""
    power = lax.mul(lax.reduce_sum(lax.mul(x, x), (2,)), np.float32(1 / x.shape[2]))
    return lax.mul(x, _spread(lax.rsqrt(lax.add(power, np.float32(1e-6))), x))


def _minus_max(x: Any) -> Any:
    """Subtract each row's maximum, so that exp cannot overflow; the maximum carries no gradient."""
    top = lax.stop_gradient(lax.reduce_max(x, (x.ndim - 1,)))
    return lax.sub(x, _spread(top, x))


def _attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Causal attention within (row, head); each argument and the result is (row, head, position, k)."""
    scores = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))))
    weights = lax.exp(_minus_max(lax.add(scores, lax.broadcast_in_dim(mask, scores.shape, (2, 3)))))
    mixed = lax.dot_general(weights, v, (((3,), (2,)), ((0, 1), (0, 1))))
    return lax.div(mixed, _spread(lax.reduce_sum(weights, (3,)), mixed))


def _layer(x: Any, inward: Any, outward: Any, mask: Any) -> Any:
    """Attention and hidden units side by side, as in GPT-J: one sum over "model" in place of two."""
    k = x.shape[2] // inward.shape[1]
    inner = lax.transpose(_dot(_normalise(x), inward, (2,), (0,)), (0, 2, 1, 3))
    query, key, value = (lax.slice_in_dim(inner, part * k, (part + 1) * k, axis=3) for part in range(3))
    hidden = lax.max(lax.slice_in_dim(inner, 3 * k, inner.shape[3], axis=3), np.float32(0))
    outer = lax.concatenate((_attend(query, key, value, mask), hidden), 3)
    return lax.add(x, _dot(outer, outward, (1, 3), (0, 1)))


def _logits(params: dict[str, Any], inputs: Any) -> Any:
    """One-hot bytes (row, position, 256) → logits of the byte after each position."""
    length = inputs.shape[1]
    x = _dot(inputs, params["embed"], (2,), (0,))
    x = lax.add(x, lax.broadcast_in_dim(params["position"], x.shape, (1, 2)))
    mask = np.where(np.tri(length, dtype=bool), np.float32(0), np.float32(-1e9))
    layers = (params["inward"], params["outward"])
    x, _ = lax.scan(lambda x, layer: (_layer(x, *layer, mask), None), x, layers)
    return _dot(_normalise(x), params["embed"], (2,), (1,))


def loss_of(params: dict[str, Any], batch: Batch) -> Any:
    """Mean cross-entropy in nats a byte over `tokens` int32 (B, T+1), rows weighted by `weight` f32 (B,).

    A row of weight 0 changes neither the loss nor a gradient, whatever its bytes: padding is exact.
    """
    tokens, weight = batch["tokens"], batch["weight"]
    shape = (*tokens.shape, VOCABULARY)
    length = tokens.shape[1] - 1
    same = lax.eq(lax.broadcast_in_dim(tokens, shape, (0, 1)), lax.broadcasted_iota(np.int32, shape, 2))
    one_hot = lax.convert_element_type(same, np.float32)
    logits = _minus_max(_logits(params, lax.slice_in_dim(one_hot, 0, length, axis=1)))
    target = lax.reduce_sum(lax.mul(logits, lax.slice_in_dim(one_hot, 1, length + 1, axis=1)), (2,))
    surprise = lax.sub(lax.log(lax.reduce_sum(lax.exp(logits), (2,))), target)
    total = lax.reduce_sum(lax.mul(lax.reduce_sum(surprise, (1,)), weight), (0,))
    return lax.div(total, lax.mul(lax.reduce_sum(weight, (0,)), np.float32(length)))


def train_step(state: State, batch: Batch, config: ModelConfig = DEMO) -> tuple[State, dict[str, Any]]:
    """One Adam step: `(state, batch) → (state, {"loss"})`; pure and deterministic."""
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, opt = _optimizer(config).update(gradients, state["opt"])
    params = {name: lax.add(state["params"][name], updates[name]) for name in PARAM_SPECS}
    return {"params": params, "opt": opt, "step": lax.add(state["step"], np.int32(1))}, {"loss": loss}


def make_train_step(mesh: Mesh, config: ModelConfig = DEMO) -> Any:
    """The jitted `train_step(state, batch)` for a mesh; it donates its state argument."""
    out = (state_shardings(mesh, config), {"loss": NamedSharding(mesh, PartitionSpec())})
    return jax.jit(_step_of(config), donate_argnums=0, out_shardings=out)


@lru_cache
def _step_of(config: ModelConfig) -> Callable[[State, Batch], tuple[State, dict[str, Any]]]:
    """The same function in each world: what JAX has traced of it once, it need not trace again."""

    def demo_train_step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        return train_step(state, batch, config)

    return demo_train_step
