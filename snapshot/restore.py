"""Building a state on the devices of this process from the shards its arena holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from reshard.boxes import Box, full_box
from reshard.errors import UsageError
from reshard.layout import ArrayLayout
from snapshot.copying import shared_team
from snapshot.placing import StoredBoxes, place_boxes
from snapshot.shardings import box_of
from snapshot.target_arrays import TargetArray
from snapshot.tree import LeafInfo, flatten, is_prng_key, key_impl, leaf_info, unflatten

_OTHER_STATE = (
    "Restore into a state of the same leaves, shapes and dtypes as was captured; give a new model another "
    "--persist-dir."
)


class BoxSource(StoredBoxes, Protocol):
    """Where restore takes elements from; `snapshot.source.ShardSource` is one."""

    step: int
    arrays: dict[str, ArrayLayout]

    def read(self, path: str, box: Box) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a private C-order array of the box's elements, verified; MissingShardError if it cannot."""
        ...


def restore(
    target: Any, source: BoxSource, *, num_threads: int | None = None, count_writes: bool = False
) -> Any:
    """Return the state of `source` in the form of `target`.

    `target` is a pytree of jax.ShapeDtypeStructs (or arrays) with shardings, any sharding whatever the
    snapshot's; numpy arrays and Python scalars in it come back as such. Device arrays are copies: they
    never alias the arena or one another, and may be donated. Each shard is read and verified once, by
    `num_threads` threads (default: one for each processor this process may use, four at most). Raises
    MissingShardError, naming array and box, when a part is nowhere intact, UsageError, naming the leaf,
    when shape or dtype differ from the snapshot's, and with `count_writes`, a byte an element more,
    InvariantBrokenError when an element of a device's box was not written exactly once.
    """
    flat = flatten(target)
    devices = _Devices()
    leaves = [
        _checked(path, leaf, source, devices) for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    placed = [leaf for leaf in leaves if leaf.array is not None]
    placed.sort(key=lambda leaf: leaf.info.nbytes, reverse=True)
    arrays = [leaf.array for leaf in placed if leaf.array is not None]
    place_boxes(arrays, source, shared_team(num_threads), count_writes=count_writes)
    return unflatten(flat.treedef, [_finished(leaf, source) for leaf in leaves])


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of the target, how it is stored, and the array it becomes, where devices were chosen for it."""

    path: str
    target: Any
    info: LeafInfo
    array: TargetArray | None


class _Devices:
    """Which box each device of this process has; worked out once for arrays that are alike."""

    def __init__(self) -> None:
        config: Any = jax.config  # lacks the name for type checkers
        self.enable_x64 = bool(config.jax_enable_x64)
        self._boxes: dict[tuple[Any, tuple[int, ...]], dict[jax.Device, Box]] = {}

    def boxes(self, sharding: Any, shape: tuple[int, ...]) -> dict[jax.Device, Box]:
        key = (sharding, shape)
        if key not in self._boxes:
            indices = sharding.addressable_devices_indices_map(shape)
            self._boxes[key] = {
                device: full_box(shape) if index is None else box_of(index, shape)
                for device, index in indices.items()
            }
        return self._boxes[key]


def _checked(path: str, target: Any, source: BoxSource, devices: _Devices) -> _Leaf:
    info = leaf_info(path, target)
    _check_stored(path, info, source)
    # An array that no device was chosen for stays uncommitted, or a jitted step with a mesh would refuse it.
    is_free = isinstance(target, jax.Array) and not target.committed
    if info.sharding is None or is_free:
        return _Leaf(path, target, info, None)
    shape = tuple(info.shape)
    array = TargetArray(
        path=path,
        shape=shape,
        dtype=info.dtype,
        sharding=info.sharding,
        boxes=devices.boxes(info.sharding, shape),
        enable_x64=devices.enable_x64,
    )
    return _Leaf(path, target, info, array)


def _finished(leaf: _Leaf, source: BoxSource) -> Any:
    shape = tuple(leaf.info.shape)
    if not isinstance(leaf.target, (jax.Array, jax.ShapeDtypeStruct)):
        value = source.read(leaf.path, full_box(shape)).view(leaf.info.dtype)
        return value if isinstance(leaf.target, np.ndarray) else type(leaf.target)(value.item())
    if leaf.array is None:
        array = jnp.array(source.read(leaf.path, full_box(shape)).view(leaf.info.dtype), copy=True)
    else:
        # What could not be put together of the shards first chosen for it may be of others.
        if missing := leaf.array.missing():
            leaf.array.put({box: source.read(leaf.path, box) for box in missing})
        array = leaf.array.finish()
    return jax.random.wrap_key_data(array, impl=key_impl(leaf.target)) if is_prng_key(leaf.target) else array


def _check_stored(path: str, info: LeafInfo, source: BoxSource) -> None:
    stored = source.arrays.get(path)
    if stored is None:
        raise UsageError(
            f"the snapshot of step {source.step} has no leaf {path}: it is of another state",
            remedy=_OTHER_STATE,
        )
    if stored.shape != tuple(info.shape) or stored.dtype != str(info.dtype):
        raise UsageError(
            f"leaf {path} is {info.dtype}{tuple(info.shape)}, the snapshot of step {source.step} has "
            f"{stored.dtype}{stored.shape}",
            remedy=_OTHER_STATE,
            path=path,
        )


def check_complete(target: Any, source: BoxSource) -> None:
    """Raise UsageError when the snapshot has leaves that the target has not: they would be lost unsaid."""
    if left := sorted(source.arrays.keys() - set(flatten(target).paths)):
        raise UsageError(
            f"the snapshot of step {source.step} has leaves that the state has not, among them {left[0]}",
            remedy=_OTHER_STATE,
            path=left[0],
        )
