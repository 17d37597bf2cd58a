"""Pytrees of training state as named leaves, and the layout they have on a mesh.

Leaves are jax.Arrays, typed PRNG keys (stored as their key data), numpy arrays and Python scalars. Those
without a mesh (numpy, scalars, arrays on one device) count as replicated: every host holds them whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from snapshot.shardings import SpecReader

HOST_LEAF_TYPES = (np.ndarray, np.generic, bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class FlatTree:
    """A pytree taken apart: `paths[i]` names `leaves[i]`, as `jax.tree_util.keystr` writes it."""

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    treedef: Any


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """The array a leaf is stored as; `sharding` is None for leaves that only the host has."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, as a snapshot stores it."""
        return math.prod(self.shape) * self.dtype.itemsize


def flatten(tree: Any) -> FlatTree:
    """Take a pytree apart."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
    return FlatTree(paths, tuple(leaf for _, leaf in leaves), treedef)


def unflatten(treedef: Any, leaves: list[Any]) -> Any:
    """Put a pytree together again."""
    return jax.tree_util.tree_unflatten(treedef, leaves)


def is_prng_key(leaf: Any) -> bool:
    """Tell whether a leaf (array or ShapeDtypeStruct) is a typed PRNG key."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def key_impl(leaf: Any) -> Any:
    """Return the PRNG implementation of typed keys, also for a ShapeDtypeStruct of them."""
    found: list[Any] = []
    jax.eval_shape(
        lambda keys: found.append(jax.random.key_impl(keys)), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    )
    return found[0]


def leaf_info(path: str, leaf: Any) -> LeafInfo:
    """Return how a leaf is stored: shape, dtype and sharding of its array of plain numbers.

    Raises UsageError, naming the path, for a leaf that cannot be stored.
    """
    if is_prng_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return LeafInfo(data.shape, data.dtype, leaf.sharding)
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return LeafInfo(leaf.shape, np.dtype(leaf.dtype), leaf.sharding)
    if isinstance(leaf, HOST_LEAF_TYPES):
        value = np.asarray(leaf)
        if not value.dtype.hasobject:
            return LeafInfo(value.shape, value.dtype, None)
    raise UsageError(
        f"leaf {path} is a {type(leaf).__name__}, which a snapshot cannot hold",
        remedy="Keep only jax and numpy arrays, PRNG keys, numbers and booleans in the state.",
        path=path,
    )


def target_of(tree: Any, mesh: Mesh | None = None) -> Any:
    """Return ShapeDtypeStructs of a state's arrays, with their shardings, for `snapshot.restore.restore`.

    With `mesh`, the same partition specs on that mesh. Arrays that no device was chosen for get no
    sharding, so that they stay free to go where the others are. Host-only leaves stay as they are.
    """

    def struct(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding: Any = leaf.sharding if leaf.committed else None
        if mesh is not None and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map(struct, tree)


def layout_of(
    tree: Any, mesh: Mesh, host_of: Mapping[int, HostId], *, elastic_axis: str | None = None
) -> Layout:
    """Derive the layout of a state (arrays or ShapeDtypeStructs) on `mesh`.

    `host_of` gives the host of each device id of the mesh. Raises UsageError, naming the leaf, for one
    whose sharding no partition spec of this mesh describes (`snapshot.shardings`).
    """
    flat = flatten(tree)
    try:
        hosts = tuple(host_of[device.id] for device in mesh.devices.flat)
    except KeyError as error:
        raise UsageError(f"device {error} of the mesh has no host") from None
    sizes = tuple(int(size) for size in mesh.devices.shape)
    mesh_layout = MeshLayout(axis_names=tuple(map(str, mesh.axis_names)), axis_sizes=sizes, hosts=hosts)
    reader = SpecReader(mesh, mesh_layout)
    arrays: list[ArrayLayout] = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        info = leaf_info(path, leaf)
        shape = tuple(info.shape)
        arrays.append(
            ArrayLayout(
                path=path,
                shape=shape,
                dtype=str(info.dtype),
                itemsize=info.dtype.itemsize,
                spec=reader.spec(path, shape, info.sharding, is_array=isinstance(leaf, jax.Array)),
            )
        )
    return Layout(mesh=mesh_layout, arrays=tuple(arrays), elastic_axis=elastic_axis)
