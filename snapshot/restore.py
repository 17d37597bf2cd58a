"""Building a state on the devices of this process from the shards its arena holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from reshard.boxes import Box, full_box
from reshard.errors import UsageError
from reshard.layout import ArrayLayout
from snapshot.copying import shared_team
from snapshot.placing import StoredBoxes, TargetBox, place_boxes
from snapshot.shardings import box_of
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


def restore(target: Any, source: BoxSource, *, num_threads: int | None = None) -> Any:
    """Return the state of `source` in the form of `target`.

    `target` is a pytree of jax.ShapeDtypeStructs (or arrays) with shardings, any sharding whatever the
    snapshot's; numpy arrays and Python scalars in it come back as such. Device arrays are copies: they
    never alias the arena or one another, and may be donated. Each shard is read and verified once, by
    `num_threads` threads (default: one for each processor this process may use, four at most). Raises
    MissingShardError, naming array and box, when a part is nowhere intact, UsageError, naming the leaf,
    when shape or dtype differ from the snapshot's.
    """
    flat = flatten(target)
    leaves = [_checked(path, leaf, source) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    placed = sorted((leaf for leaf in leaves if leaf.boxes), key=lambda leaf: leaf.info.nbytes, reverse=True)
    place_boxes([list(leaf.boxes.values()) for leaf in placed], source, shared_team(num_threads))
    return unflatten(flat.treedef, [_finished(leaf, source) for leaf in leaves])


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of the target: how it is stored, and the boxes that devices of this process need of it.

    `order` lists the box of each device, as JAX orders them; both are empty where no device was chosen.
    """

    path: str
    target: Any
    info: LeafInfo
    boxes: dict[Box, TargetBox]
    order: tuple[Box, ...]


def _checked(path: str, target: Any, source: BoxSource) -> _Leaf:
    info = leaf_info(path, target)
    _check_stored(path, info, source)
    if isinstance(target, jax.Array) and not target.committed:
        info = replace(info, sharding=None)
    boxes: dict[Box, TargetBox] = {}
    order: list[Box] = []
    shape, sharding = tuple(info.shape), info.sharding
    devices = {} if sharding is None else sharding.addressable_devices_indices_map(shape)
    for device, index in devices.items():
        box = full_box(shape) if index is None else box_of(index, shape)
        order.append(box)
        found = boxes.setdefault(box, TargetBox(path=path, box=box, dtype=info.dtype))
        found.places.append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return _Leaf(path, target, info, boxes, tuple(order))


def _finished(leaf: _Leaf, source: BoxSource) -> Any:
    shape = tuple(leaf.info.shape)
    if not isinstance(leaf.target, (jax.Array, jax.ShapeDtypeStruct)):
        value = source.read(leaf.path, full_box(shape)).view(leaf.info.dtype)
        return value if isinstance(leaf.target, np.ndarray) else type(leaf.target)(value.item())
    if leaf.info.sharding is None:
        # No device chosen: stays uncommitted, or a jitted step with a mesh would refuse it.
        array = jnp.array(source.read(leaf.path, full_box(shape)).view(leaf.info.dtype), copy=True)
    else:
        array = _assembled(leaf, source)
    return jax.random.wrap_key_data(array, impl=key_impl(leaf.target)) if is_prng_key(leaf.target) else array


def _assembled(leaf: _Leaf, source: BoxSource) -> jax.Array:
    """Make one array of what was placed, and of what must be put together in another way."""
    for box, target in leaf.boxes.items():
        if not target.arrays:
            target.put(source.read(leaf.path, box).reshape(-1).view(np.uint8))
    placed = {box: iter(target.arrays) for box, target in leaf.boxes.items()}
    shards = [next(placed[box]) for box in leaf.order]
    return jax.make_array_from_single_device_arrays(
        tuple(leaf.info.shape), leaf.info.sharding, shards, dtype=leaf.info.dtype
    )


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
