"""Numbers that all processes of a world agree on: each proposes its own, all get the largest of each.

It is a reduction on the devices, over one device of each process, so it needs no other connection, and a
lost peer shows as in any step. One device each: where a reduction takes in several devices of one process,
a survivor mostly cannot leave the broken world in place (CPU, Gloo).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Agreement:
    """Agrees on `width` numbers of 32 bits (propose -x to agree on the smallest x).

    `devices` are those of a world, in the same order in every process. Where they belong to one process
    nothing is dispatched. Every process must make the same calls in the same order.
    """

    def __init__(self, devices: Iterable[jax.Device], width: int) -> None:
        leaders = one_device_a_process(devices)
        self._width = width
        self._is_alone = len(leaders) == 1
        mesh = Mesh(np.array(leaders), ("process",))
        self._sharding = NamedSharding(mesh, PartitionSpec("process"))
        self._reduce = jax.jit(_largest, out_shardings=NamedSharding(mesh, PartitionSpec()))
        (self._own,) = (device for device in leaders if device.process_index == jax.process_index())
        self._pending: Any = None

    @property
    def is_pending(self) -> bool:
        """Whether something was proposed that has not been read."""
        return self._pending is not None

    def propose(self, values: Sequence[int]) -> None:
        """Start to agree; an earlier proposal that was not read is forgotten.

        On CPU this waits for the peers. There a collective that is still running when the next step is
        dispatched can meet it in another order in each process, and both wait for ever. On other devices
        work is done in the order of its dispatch, and nothing is waited for. Raises JaxRuntimeError when a
        peer is lost, OverflowError for a number that does not fit.
        """
        own = np.array([values], dtype=np.int32)
        if own.shape != (1, self._width):
            raise ValueError(f"{len(values)} numbers proposed, not {self._width}")
        if self._is_alone:
            self._pending = own[0]
            return
        shard = jax.device_put(own, self._own)
        shape = (self._sharding.mesh.size, self._width)
        self._pending = self._reduce(jax.make_array_from_single_device_arrays(shape, self._sharding, [shard]))
        if self._own.platform == "cpu":
            self._pending.block_until_ready()

    def read(self) -> tuple[int, ...]:
        """What was agreed on; to be read once. Raises JaxRuntimeError when a peer was lost meanwhile."""
        pending, self._pending = self._pending, None
        if isinstance(pending, jax.Array):
            pending = pending.addressable_data(0)
        return tuple(int(value) for value in np.asarray(pending))


def one_device_a_process(devices: Iterable[jax.Device]) -> tuple[jax.Device, ...]:
    """The first device of each process, in the order of `devices`."""
    first: dict[int, jax.Device] = {}
    for device in devices:
        first.setdefault(device.process_index, device)
    return tuple(first.values())


def _largest(values: jax.Array) -> jax.Array:
    return values.max(axis=0)
