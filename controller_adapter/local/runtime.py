"""Devices of one process, shared out among virtual slices: consecutive ones belong together."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from elastic.events import WorldSpec
from elastic.job import JobSpec
from reshard.errors import UsageError
from reshard.ids import HostId


class LocalRuntime:
    """See `elastic.ports.Runtime`. Raises UsageError when the slices need more devices than there are."""

    def __init__(self, spec: JobSpec) -> None:
        per_slice = spec.config.devices_per_host
        needed = spec.config.num_slices * per_slice
        devices = jax.devices()
        if len(devices) < needed:
            raise UsageError(
                f"{needed // per_slice} slices of {per_slice} devices need {needed}, JAX has {len(devices)}",
                remedy=f"Set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before JAX starts.",
            )
        self._devices = tuple(
            tuple(devices[start : start + per_slice]) for start in range(0, needed, per_slice)
        )
        self._slice_of = {device.id: index for index, own in enumerate(self._devices) for device in own}

    def form(self, world: WorldSpec) -> Sequence[jax.Device]:
        """The devices of the world's slices, in rank order."""
        return [device for index in world.slices for device in self._devices[index]]

    def host_of(self, device: jax.Device) -> HostId:
        """The virtual host of a device."""
        return HostId(self._slice_of[device.id])

    def drop(self) -> None:
        """Nothing to let go: the devices stay with the process, and arrays with whoever refers to them."""
