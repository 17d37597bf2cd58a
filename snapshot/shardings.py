"""Partition specs read from the shardings that JAX arrays have.

JAX gives an array one of a few kinds of sharding. A `NamedSharding` of the layout's mesh names its axes.
Any other one (another mesh over the same devices, as `jax.pmap` makes; a `GSPMDSharding`) says by its index
map which device has what, and the spec is worked out from that, where one says the same. What is whole on
each of its devices counts as replicated, whatever those are. The memory kind does not matter.

JAX does not split a dim that does not divide: device_put, jit's in_shardings and out_shardings and index maps
raise `IndivisibleError`; inside a jitted function a constraint may ask for it, but what comes out of the
function is whole along that dim. Seen with JAX 0.10.2; a `PositionalSharding` no longer exists there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from reshard.boxes import Box
from reshard.errors import UsageError
from reshard.layout import MeshLayout, Spec, spec_from_partition

_PLACE_IT = "Give the jitted step out_shardings of this mesh, or jax.device_put the leaf."


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Turn the slices of a device's shard into a box."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


class SpecReader:
    """Reads the specs of the leaves of one state on `mesh`, whose layout is `mesh_layout`.

    For one state only: it keeps what it worked out, and with it devices.
    """

    def __init__(self, mesh: Mesh, mesh_layout: MeshLayout) -> None:
        self._mesh = mesh
        self._layout = mesh_layout
        self._alike: dict[Any, bool] = {}
        self._derived: dict[tuple[Any, tuple[int, ...]], Spec | None] = {}

    def spec(self, path: str, shape: tuple[int, ...], sharding: Any, *, is_array: bool) -> Spec:
        """Return the spec of a leaf of this shape; `sharding` is None for one that only the host has.

        `is_array`: it is an array, not merely described. Raises UsageError, naming the leaf, when no spec of
        the mesh says what the sharding does.
        """
        if sharding is None:
            return ((),) * len(shape)
        if isinstance(sharding, NamedSharding):
            _check_settled(path, sharding, is_array=is_array)
            if self._is_alike(sharding.mesh):
                return _named_spec(sharding.spec, len(shape))
        if sharding.is_fully_replicated:
            return ((),) * len(shape)
        key = (sharding, shape)
        if key not in self._derived:
            self._derived[key] = self._derive(path, shape, sharding)
        spec = self._derived[key]
        if spec is None:
            raise UsageError(
                f"leaf {path} has sharding {sharding}, which no partition spec of the mesh "
                f"{dict(self._mesh.shape)} describes",
                remedy=_PLACE_IT,
                path=path,
            )
        return spec

    def _is_alike(self, mesh: Mesh | AbstractMesh) -> bool:
        """Tell whether the other mesh has the same axes and the same devices in the same order, if any."""
        if mesh not in self._alike:
            own = self._mesh
            self._alike[mesh] = mesh is own or (
                tuple(mesh.shape.items()) == tuple(own.shape.items())
                and (isinstance(mesh, AbstractMesh) or bool(np.all(mesh.devices == own.devices)))
            )
        return self._alike[mesh]

    def _check_devices(self, path: str, sharding: Any) -> None:
        own = dict(self._mesh.shape)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            raise UsageError(
                f"leaf {path} is laid out on the abstract mesh {dict(sharding.mesh.shape)}, which says "
                f"nothing of the devices of {own}",
                remedy="Use the same axes in the same order, or a jax.sharding.Mesh of the devices.",
                path=path,
            )
        devices = sharding.device_set
        if devices != set(self._mesh.devices.flat):
            raise UsageError(
                f"leaf {path} is partitioned over {len(devices)} devices, not over those of the mesh {own}",
                remedy=_PLACE_IT,
                path=path,
            )

    def _derive(self, path: str, shape: tuple[int, ...], sharding: Any) -> Spec | None:
        """Work out which axes give each device the box that the sharding gives it, None if none do."""
        self._check_devices(path, sharding)
        try:
            index_map = sharding.devices_indices_map(shape)
        except ValueError as error:  # of JAX: the shape does not divide
            raise UsageError(f"leaf {path} cannot have its sharding: {error}", path=path) from error
        boxes = np.array([box_of(index_map[device], shape) for device in self._mesh.devices.flat])
        spec: list[tuple[str, ...]] = []
        for dim in range(len(shape)):
            start, stop = boxes[:, dim].T
            # All parts of a dim are equally long; of an empty one, no axes are as good as any.
            axes = self._layout.axes_of_parts(start // np.maximum(stop - start, 1))
            if axes is None:
                return None
            spec.append(axes)
        return tuple(spec)


def _check_settled(path: str, sharding: NamedSharding, *, is_array: bool) -> None:
    spec = sharding.spec
    if spec.unreduced:
        axes = ", ".join(sorted(map(str, spec.unreduced)))
        raise UsageError(
            f"leaf {path} is unreduced over {axes}: each device has a term of a sum, none has the value",
            remedy="Return it from the jitted step with out_shardings that are reduced.",
            path=path,
        )
    # An array made with an unconstrained dim has it whole on each device.
    if not is_array and PartitionSpec.UNCONSTRAINED in spec.partitions:
        raise UsageError(
            f"leaf {path} is described by {spec}, which leaves a dim to the compiler",
            remedy="Name the mesh axes that partition it, or None.",
            path=path,
        )


def _named_spec(spec: PartitionSpec, rank: int) -> Spec:
    # Iterating over a spec with `reduced` axes raises; its partitions are the same without.
    entries = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec.partitions]
    return spec_from_partition(entries + [None] * (rank - len(entries)))
