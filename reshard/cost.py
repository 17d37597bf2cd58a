"""How long a change of topology takes on a described cluster, and what it does to the step.

Every prediction is a bound at line rate: the largest load of one host, over what that host can do. Nothing is
faster than that; what is slower (a busy network, small messages, a cold start) is not in it, except as
`request_s` and as the rates somebody measured. A phase names the host and the rate that bound it.

    transfer = max over hosts of (bytes sent, bytes received) / network rate + requests of one host × request_s
    restore  = max over devices of the bytes of its shards / copy rate of one chip
    compute  = step before × (rows a replica × replicas / chips × padding, after) / (the same before)
    exchange = 2 (S - 1) / S × gradient bytes / (hosts a slice × network rate), S slices
    step     = max(compute, exchange): they overlap

Planning itself is not predicted: who asks has just planned, and can say how long it took.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from reshard.accelerators import Accelerator
from reshard.choice_figures import Figures
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, Spec

__all__ = [
    "Phase",
    "Rates",
    "StepCost",
    "StepPredictor",
    "Workload",
    "device_bytes",
    "goodput",
    "predict_restore",
    "predict_transfer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What bounds one host, in bytes per second; None is not known, and so is what depends on it.

    `network_bytes_s` is one way and of one host, `copy_bytes_s` from host to device memory and of one chip.
    `request_s` is the cost of one request to a peer beyond its bytes.
    """

    network_bytes_s: float | None = None
    copy_bytes_s: float | None = None
    request_s: float = 0.0

    def __post_init__(self) -> None:
        rates = (self.network_bytes_s, self.copy_bytes_s)
        if any(rate is not None and not rate > 0 for rate in rates) or not self.request_s >= 0:
            raise UsageError(f"rates must be positive, got {self}")

    @classmethod
    def of(cls, accelerator: Accelerator, *, request_s: float = 0.0) -> Rates:
        """Return the published rates of an accelerator and its host."""
        return cls(
            network_bytes_s=accelerator.value("host_network_bytes_s"),
            copy_bytes_s=accelerator.value("host_copy_bytes_s"),
            request_s=request_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How long one phase takes, None when nobody can tell, and what bounds it or what is missing, in words."""

    name: str
    seconds: float | None
    bound: str


def predict_transfer(
    rates: Rates, sent: Mapping[HostId, int], received: Mapping[HostId, int], *, num_requests: int = 0
) -> Phase:
    """Return the time to move a plan's bytes: `sent` and `received` over the network by each host.

    Hosts send and receive at once. `num_requests` is the largest number that one host makes.
    """
    loads = [(nbytes, host, "sends") for host, nbytes in sorted(sent.items())]
    loads += [(nbytes, host, "receives") for host, nbytes in sorted(received.items())]
    nbytes, busiest, verb = max(loads, key=lambda load: load[0], default=(0, None, ""))
    if not nbytes:
        return Phase(name="transfer", seconds=0.0, bound="nothing crosses the network")
    load = f"{busiest} {verb} {nbytes / 1e9:.3g} GB"
    if rates.network_bytes_s is None:
        return Phase(name="transfer", seconds=None, bound=f"{load}; the host's network rate is not known")
    seconds = nbytes / rates.network_bytes_s + num_requests * rates.request_s
    return Phase(name="transfer", seconds=seconds, bound=f"{load} at {rates.network_bytes_s / 1e9:.4g} GB/s")


def predict_restore(rates: Rates, nbytes: int) -> Phase:
    """Return the time to copy `nbytes`, the most that one device needs, from host to device memory."""
    load = f"{nbytes / 1e9:.3g} GB to each device"
    if not nbytes:
        return Phase(name="restore", seconds=0.0, bound="the state is empty")
    if rates.copy_bytes_s is None:
        return Phase(name="restore", seconds=None, bound=f"{load}; the rate from host to device is not known")
    return Phase(
        name="restore",
        seconds=nbytes / rates.copy_bytes_s,
        bound=f"{load} at {rates.copy_bytes_s / 1e9:.4g} GB/s",
    )


def device_bytes(layout: Layout) -> int:
    """Return the bytes of the state on the fullest device, padding included."""
    return sum(num_arrays * _part_nbytes(layout, alike) for alike, num_arrays in _alike(layout.arrays))


class _Alike(NamedTuple):
    """What the bytes of an array depend on: thousands of arrays are alike in a few ways."""

    shape: tuple[int, ...]
    spec: Spec
    itemsize: int


def _alike(arrays: Iterable[ArrayLayout]) -> Iterable[tuple[_Alike, int]]:
    return Counter(_Alike(array.shape, array.spec, array.itemsize) for array in arrays).items()


def _part_nbytes(layout: Layout, alike: _Alike) -> int:
    shape = zip(alike.shape, alike.spec, strict=True)
    return math.prod(-(-size // _num_parts(layout, axes)) for size, axes in shape) * alike.itemsize


def _num_parts(layout: Layout, axes: tuple[str, ...]) -> int:
    return math.prod(layout.mesh.axis_size(axis) for axis in axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step works on: rows of the global batch over `batch_axes`, and the time it takes where known.

    `gradient_paths` are the arrays whose gradients are summed over the replicas; None stands for all.
    """

    global_batch: int
    batch_axes: tuple[str, ...]
    step_s: float | None = None
    gradient_paths: Collection[str] | None = None

    def __post_init__(self) -> None:
        if self.global_batch < 1 or (self.step_s is not None and not self.step_s > 0):
            raise UsageError(f"a workload needs a positive batch and step time, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A predicted step: `ratio` to the reference's compute, and in seconds where the reference is known.

    `exchange_s` is the sum of gradients over slices, which the compute hides while it is shorter.
    """

    ratio: float
    compute_s: float | None
    exchange_s: float | None

    @property
    def seconds(self) -> float | None:
        """The time of one step, None when the reference's is not known."""
        if self.compute_s is None:
            return None
        return max(self.compute_s, self.exchange_s or 0.0)

    @property
    def bound(self) -> str:
        """What limits the step: `compute` or `exchange`."""
        hidden = self.compute_s is None or self.exchange_s is None or self.exchange_s <= self.compute_s
        return "compute" if hidden else "exchange"


class StepPredictor:
    """Predicts the step of other layouts from the one it was measured on, `reference`.

    Compute is the same work over fewer chips; rows that fill up the batch and elements that fill up an array
    count as work. What happens inside a slice keeps its proportion to the compute, as a slice stays as it is.
    Over slices only the sum of gradients of arrays that are not partitioned over the elastic axis is modelled;
    gathers of partitioned ones, and tokens sent to experts, are not. Serves `choose_layout` as its `Costs`;
    where the step's time is not known, it weighs a step of one second there.
    """

    def __init__(self, reference: Layout, workload: Workload, rates: Rates) -> None:
        self._workload = workload
        self._rates = rates
        self._work = self._work_per_device(reference)

    def step(self, layout: Layout) -> StepCost:
        """Return the predicted step of `layout`."""
        ratio = self._work_per_device(layout) / self._work
        step_s = self._workload.step_s
        return StepCost(
            ratio=ratio,
            compute_s=None if step_s is None else step_s * ratio,
            exchange_s=self._exchange_s(layout),
        )

    def step_s(self, layout: Layout, figures: Figures) -> float:
        """See `reshard.choice_figures.Costs`."""
        step = self.step(layout)
        return max(step.ratio if step.compute_s is None else step.compute_s, step.exchange_s or 0.0)

    def move_s(self, layout: Layout, figures: Figures) -> float:
        """See `reshard.choice_figures.Costs`: the transfer to the host that receives most, then the restore."""
        received = {layout.mesh.distinct_hosts()[0]: figures.host_bytes_received}
        transfer = predict_transfer(self._rates, {}, received).seconds
        return (transfer or 0.0) + (predict_restore(self._rates, figures.device_bytes).seconds or 0.0)

    def _work_per_device(self, layout: Layout) -> float:
        num_replicas = _num_parts(layout, self._workload.batch_axes)
        rows = -(-self._workload.global_batch // num_replicas)
        stored = real = 0
        for alike, num_arrays in _alike(self._trained(layout)):
            num_parts = math.prod(_num_parts(layout, axes) for axes in alike.spec)
            stored += num_arrays * _part_nbytes(layout, alike) * num_parts
            real += num_arrays * math.prod(alike.shape) * alike.itemsize
        return rows * num_replicas / layout.mesh.num_devices * (stored / real if real else 1.0)

    def _exchange_s(self, layout: Layout) -> float | None:
        if self._rates.network_bytes_s is None:
            return None
        hosts = layout.mesh.distinct_hosts()
        num_slices = len({host.slice_index for host in hosts})
        nbytes = sum(
            array.nbytes
            for array in self._trained(layout)
            if all(layout.elastic_axis not in axes for axes in array.spec)
        )
        hosts_per_slice = len(hosts) / num_slices
        return 2 * (num_slices - 1) / num_slices * nbytes / (hosts_per_slice * self._rates.network_bytes_s)

    def _trained(self, layout: Layout) -> list[ArrayLayout]:
        paths = self._workload.gradient_paths
        return [array for array in layout.arrays if paths is None or array.path in paths]


def goodput(
    *, mtbf_s: float, downtime_s: float, slow_s: float = 0.0, slow_ratio: float = 1.0, overhead: float = 0.0
) -> float:
    """Return the part of time that makes progress, as that of an undisturbed cluster of full size.

    Every `mtbf_s` a slice is lost: `downtime_s` goes without a new step, then for `slow_s` (until the slice is
    back) steps take `slow_ratio` times as long. `overhead` is the part of each step spent on snapshots.
    """
    if not mtbf_s > 0 or downtime_s < 0 or slow_s < 0 or slow_ratio < 1 or not 0 <= overhead < 1:
        raise UsageError(
            f"no goodput for a loss every {mtbf_s} s, {downtime_s} s down, {slow_s} s at {slow_ratio} × the step"
        )
    down = min(downtime_s, mtbf_s)
    slow = min(slow_s, mtbf_s - down)
    return (mtbf_s - down - slow + slow / slow_ratio) / mtbf_s * (1 - overhead)
