"""Elastic, fault-tolerant training for JAX: a training script needs this module and no other.

    with elastic.session() as session:
        for world in session.worlds():                       # again at every change of topology
            with world:                                      # a confirmed loss ends this world quietly
                mesh = world.mesh({"data": -1, "model": 2})
                state = world.restore(init_state, shardings(mesh))
                for step, batch in world.batches(dataset, global_batch=48, num_steps=200):
                    state, metrics = train_step(state, batch)
                    world.commit(step, state, metrics)

Importing it does not import JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import (
    ElasticError,
    InsufficientMemoryError,
    InvariantBrokenError,
    JobFailedError,
    MissingShardError,
    UsageError,
)
from reshard.ids import HostId

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax

    from elastic.sessions import Session

__all__ = [
    "ElasticError",
    "HostId",
    "InsufficientMemoryError",
    "InvariantBrokenError",
    "JobFailedError",
    "MissingShardError",
    "UsageError",
    "mean_value_and_grad",
    "session",
]


def session(*, seed: int | None = None) -> Session:
    """The session of this training process: from the launcher's environment, or local (one process,
    virtual slices) without one.

    `seed` fixes the sample order of a local session; under a launcher the job's seed counts. Raises
    UsageError when the environment names a job that cannot be read.
    """
    from elastic.connect import open_session

    return open_session(seed=seed)


def mean_value_and_grad(
    loss_fn: Callable[..., jax.Array], *, weight_key: str = "weight"
) -> Callable[..., tuple[jax.Array, Any]]:
    """The function `(params, batch, *arguments) → (mean loss, its gradients)` over exactly the global batch.

    `loss_fn(params, rows, *arguments)` returns one loss for each of the rows: shape `[rows]`. `batch` comes
    from `world.batches(weight_key=...)`; micro-batches, where it has them, run one after the other. Raises
    UsageError when the batch has no weights, or the losses another shape.
    """
    from elastic.mean_gradients import mean_value_and_grad

    return mean_value_and_grad(loss_fn, weight_key)
