"""The mesh of a world's devices, of which one axis spans what is alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from reshard.errors import UsageError


def mesh_of(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> tuple[Mesh, str | None]:
    """Return the mesh of all `devices`, and the axis of size -1, if there is one.

    That axis takes what the others leave, and is outermost in the order of `devices`. Raises UsageError when
    the sizes do not fit the number of devices.
    """
    open_axes = [name for name, size in axes.items() if size == -1]
    fixed = int(np.prod([size for size in axes.values() if size != -1], dtype=np.int64))
    fits = fixed >= 1 and len(devices) % fixed == 0 and (open_axes or fixed == len(devices))
    if len(open_axes) > 1 or not fits:
        raise UsageError(
            f"a mesh {dict(axes)} does not fit {len(devices)} devices",
            remedy="Give one axis the size -1; the product of the others must divide a slice's devices.",
        )
    sizes = {name: len(devices) // fixed if size == -1 else size for name, size in axes.items()}
    outer_first = [*open_axes, *(name for name in sizes if name not in open_axes)]
    grid = np.array(devices).reshape([sizes[name] for name in outer_first])
    mesh = Mesh(grid.transpose([outer_first.index(name) for name in sizes]), tuple(sizes))
    return mesh, open_axes[0] if open_axes else None
