"""The mean loss of a global batch and its gradients, exact whatever the padding and the micro-batches are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from reshard.errors import UsageError


def mean_value_and_grad(
    loss_fn: Callable[..., jax.Array], weight_key: str
) -> Callable[..., tuple[jax.Array, Any]]:
    """See `elastic.mean_value_and_grad`."""

    def weighted(params: Any, rows: dict[str, jax.Array], total: jax.Array, arguments: Any) -> jax.Array:
        weights = rows[weight_key]
        losses = loss_fn(params, rows, *arguments)
        if losses.shape != weights.shape:
            raise UsageError(
                f"the loss function returned {losses.shape} for {weights.shape[0]} rows",
                remedy="Return one loss for each row; the mean over them is taken here.",
            )
        return jnp.sum(losses.astype(jnp.promote_types(losses.dtype, jnp.float32)) * weights) / total

    part_of = jax.value_and_grad(weighted)

    def mean(params: Any, batch: dict[str, jax.Array], *arguments: Any) -> tuple[jax.Array, Any]:
        if weight_key not in batch:
            raise UsageError(
                f"the batch has no {weight_key!r}", remedy=f"Give world.batches(weight_key={weight_key!r})."
            )
        total = jnp.sum(batch[weight_key])
        if batch[weight_key].ndim == 1:
            return part_of(params, batch, total, arguments)

        def add(sums: Any, rows: dict[str, jax.Array]) -> tuple[Any, None]:
            part = part_of(params, rows, total, arguments)
            return jax.tree.map(lambda s, p: s + p.astype(s.dtype), sums, part), None

        first = jax.tree.map(lambda array: array[0], batch)
        shapes = jax.eval_shape(part_of, params, first, total, arguments)
        (value, sums), _ = jax.lax.scan(add, jax.tree.map(_zeros, shapes), batch)
        return value, jax.tree.map(lambda s, shape: s.astype(shape.dtype), sums, shapes[1])

    return mean


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    # Sums of many parts lose less in float32 than in the bfloat16 that gradients may have.
    return jnp.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.float32))
