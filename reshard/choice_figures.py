"""What a candidate takes: memory, bytes to move, and the times that are predicted from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from reshard.candidates import Alike, Draft, Fallback, Groups, Kind
from reshard.cost import ring_exchange_s
from reshard.errors import UsageError
from reshard.fits import part_shape
from reshard.grid import Column, layout_edges, num_elements, placement
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.needs import Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory there is, in bytes; None is not known and limits nothing.

    A device needs `state_factor` bytes for each byte of state on it (gradients, activations). All hosts
    together keep `replicas` copies of the state in each of `snapshot_slots` snapshots. Raises `UsageError`
    for a factor or number below 1.
    """

    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    state_factor: float = 1.0
    replicas: int = 2
    snapshot_slots: int = 2

    def __post_init__(self) -> None:
        if self.state_factor < 1 or self.replicas < 1 or self.snapshot_slots < 1:
            raise UsageError(f"state_factor, replicas and snapshot_slots must be 1 or more, got {self}")

    def device_bytes(self, state_bytes: int) -> int:
        """Return what a device needs that has so many bytes of state."""
        return math.ceil(self.state_factor * state_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a candidate takes, in bytes.

    `device_bytes`: state on the fullest device, padding included. `snapshot_bytes`: the mean share of one
    host in the snapshots. `bytes_moved`: the lower bound of what crosses the network to get there, of which
    one host receives at most `host_bytes_received`. `replicated_bytes`: what each slice has of arrays that
    are not partitioned over the axis any more. `padding_factor`: stored bytes over real ones, of the whole
    state.
    """

    num_slices: int
    num_hosts: int
    num_devices: int
    num_devices_before: int
    device_bytes: int
    snapshot_bytes: int
    bytes_moved: int
    host_bytes_received: int
    replicated_bytes: int
    padding_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout in question: `axis` has `axis_size`, on `slices`; `idle` slices have no part in it.

    `figures` and the times, in seconds, are None where there is no such layout. `cost_s` is the time to get
    there and of the steps until the next change. `refused` says why it cannot be chosen, "" when it can.
    Raises `UsageError` when only some of the figures and times are there.
    """

    kind: Kind
    axis: str
    axis_size: int
    slices: tuple[int, ...]
    idle: tuple[int, ...]
    fallbacks: tuple[Fallback, ...]
    figures: Figures | None = None
    step_s: float | None = None
    move_s: float | None = None
    cost_s: float | None = None
    refused: str = ""

    def __post_init__(self) -> None:
        missing = [value is None for value in (self.figures, self.step_s, self.move_s, self.cost_s)]
        if any(missing) and not all(missing):
            raise UsageError(f"a candidate ({self.kind}) has either all of its figures and times or none")


class Costs(Protocol):
    """Predicts what a candidate costs in seconds."""

    def step_s(self, layout: Layout, figures: Figures) -> float:
        """Return how long a step takes in this layout."""
        ...

    def move_s(self, layout: Layout, figures: Figures) -> float:
        """Return how long it takes to get there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCosts:
    """Compute goes with the devices in use; what is replicated is summed over the slices at each step.

        step = step_s_before × devices before / devices in use × padding factor
             + the sum of the replicated bytes over slices (`reshard.cost.ring_exchange_s`)
        move = bytes that the busiest host receives / network rate

    The sum is one ring all-reduce of all that is replicated: about right for weights, whose gradients have to
    be summed, too much for optimizer state. `network_bytes_s` is the rate of one host, one way.
    """

    step_s_before: float = 1.0
    network_bytes_s: float = 12.5e9

    def step_s(self, layout: Layout, figures: Figures) -> float:
        """See `Costs`."""
        compute_s = self.step_s_before * figures.num_devices_before / figures.num_devices
        exchange_s = ring_exchange_s(
            figures.replicated_bytes,
            num_slices=figures.num_slices,
            num_hosts=figures.num_hosts,
            network_bytes_s=self.network_bytes_s,
        )
        return compute_s * figures.padding_factor + exchange_s

    def move_s(self, layout: Layout, figures: Figures) -> float:
        """See `Costs`."""
        return figures.host_bytes_received / self.network_bytes_s


def figures_of(
    draft: Draft,
    mesh: MeshLayout,
    groups: Groups,
    needs: Needs[Alike],
    *,
    num_devices_before: int,
    limits: Limits,
) -> Figures:
    """Return what a draft takes on its mesh."""
    hosts, sizes = mesh.distinct_hosts(), mesh.sizes()
    target, received = needs.targets(mesh), np.zeros(len(hosts), np.int64)
    device_bytes = stored_bytes = replicated_bytes = 0
    for alike, paths in groups.items():
        array = _array(alike, draft)
        part_bytes = math.prod(part_shape(array.shape, array.spec, sizes)) * array.itemsize
        num_parts = math.prod(sizes[axis] for axes in array.spec for axis in axes)
        device_bytes += len(paths) * part_bytes
        stored_bytes += len(paths) * part_bytes * num_parts
        received += needs.lacking(alike, mesh, array, len(paths), target)
        if array.spec != alike.spec:
            replicated_bytes += len(paths) * _slice_bytes(array, mesh)
    state_bytes = total_bytes(groups)
    copies = limits.snapshot_slots * min(limits.replicas, len(draft.slices))
    return Figures(
        num_slices=len(draft.slices),
        num_hosts=len(hosts),
        num_devices=mesh.num_devices,
        num_devices_before=num_devices_before,
        device_bytes=device_bytes,
        snapshot_bytes=-(-copies * state_bytes // len(hosts)),
        bytes_moved=int(received.sum()),
        host_bytes_received=int(received.max()),
        replicated_bytes=replicated_bytes,
        padding_factor=stored_bytes / state_bytes if state_bytes else 1.0,
    )


def total_bytes(groups: Groups) -> int:
    """Return the bytes of the whole state, once."""
    return sum(len(paths) * math.prod(alike.shape) * alike.itemsize for alike, paths in groups.items())


def held_slices_first(needs: Needs[Alike], groups: Groups, slices: Iterable[int]) -> tuple[int, ...]:
    """Return `slices`, those that hold most bytes of the state first; then by index."""
    held: dict[int, int] = dict.fromkeys(slices, 0)
    for alike in groups:
        for index, elements in needs.elements_by_slice(alike).items():
            if index in held:
                held[index] += elements * alike.itemsize
    return tuple(sorted(held, key=lambda index: (-held[index], index)))


def _array(alike: Alike, draft: Draft) -> ArrayLayout:
    spec, padded = draft.treated[alike]
    return ArrayLayout(
        path="", shape=alike.shape, dtype="", itemsize=alike.itemsize, spec=spec, padded=padded
    )


def _slice_bytes(array: ArrayLayout, mesh: MeshLayout) -> int:
    """Return the bytes that the first slice has of an array, each element once."""
    hosts = mesh.distinct_hosts()
    placed = placement(mesh, array.spec)
    num_first = sum(host.slice_index == hosts[0].slice_index for host in hosts)
    distinct: Column = np.unique(placed.box[: int(np.searchsorted(placed.host, num_first))])
    low, high = placed.table.low[distinct], placed.table.high[distinct]
    return int(num_elements(layout_edges(mesh, array), low, high).sum()) * array.itemsize
