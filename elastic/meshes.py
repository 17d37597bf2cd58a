"""The mesh of a world's devices, of which one axis spans what is alive, and shardings that fit it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reshard.errors import UsageError
from reshard.fits import fitted_spec
from reshard.layout import spec_from_partition


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


def fitted_sharding(
    mesh: Mesh, axis: str, shape: Sequence[int], spec: PartitionSpec, *, memory_kind: str | None = None
) -> NamedSharding:
    """Return the sharding `spec` on `mesh` for an array of this shape; a dim that does not divide is
    replicated over `axis`.

    Raises UsageError when another axis is what does not divide, or the spec does not fit the shape.
    """
    entries = spec_from_partition(tuple(spec))
    named = [name for axes in entries for name in axes]
    if len(set(named)) != len(named):  # told on any number of slices, not only where every dim divides
        raise UsageError(f"{spec} uses a mesh axis twice", remedy="Name each axis for one dim only.")
    fitted = fitted_spec(tuple(shape), entries, {str(name): size for name, size in mesh.shape.items()}, axis)
    if fitted != entries:
        while fitted and not fitted[-1]:
            fitted = fitted[:-1]
        spec = PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in fitted))
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def map_specs(place: Callable[[Any, PartitionSpec], Any], specs: Any, shapes: Any) -> Any:
    """Return `place(shape, spec)` for every leaf of `shapes`.

    `specs` is a pytree of PartitionSpecs, of the structure of `shapes` or a prefix of it, or a function that
    gives the spec of a leaf.
    """
    if callable(specs):
        return jax.tree.map(lambda leaf: place(leaf.shape, specs(leaf)), shapes)

    def place_all(spec: PartitionSpec, subtree: Any) -> Any:
        return jax.tree.map(lambda leaf: place(leaf.shape, spec), subtree)

    return jax.tree.map(place_all, specs, shapes, is_leaf=lambda node: isinstance(node, PartitionSpec))
