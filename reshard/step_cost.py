"""What a change of topology does to the step: the same work on fewer chips, and gradients over fewer slices.

    compute  = step before × (rows a replica × replicas / chips × padding, after) / (the same before)
    exchange = 2 (S - 1) / S × gradient bytes / (hosts a slice × network rate), S slices
    step     = max(compute, exchange): they overlap

The exchange is that of a ring, which no all-reduce undercuts. Source: Patarasuk and Yuan, Bandwidth optimal
all-reduce algorithms for clusters of workstations, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from reshard.choice_figures import Figures
from reshard.cost import Rates, group_alike, num_parts, part_bytes, predict_restore, predict_transfer
from reshard.errors import UsageError
from reshard.layout import ArrayLayout, Layout

__all__ = ["StepCost", "StepPredictor", "Workload"]


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
    Over slices only the sum of gradients of arrays that are not partitioned over the elastic axis is
    modelled; gathers of partitioned ones, and tokens sent to experts, are not. Serves `choose_layout` as its
    `Costs`; where the step's time is not known, it weighs a step of one second there.
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
        """See `reshard.choice_figures.Costs`: transfer to the host that receives most, then restore."""
        received = {layout.mesh.distinct_hosts()[0]: figures.host_bytes_received}
        transfer = predict_transfer(self._rates, {}, received).seconds
        return (transfer or 0.0) + (predict_restore(self._rates, figures.device_bytes).seconds or 0.0)

    def _work_per_device(self, layout: Layout) -> float:
        num_replicas = num_parts(layout, self._workload.batch_axes)
        rows = -(-self._workload.global_batch // num_replicas)
        stored = real = 0
        for alike, num_arrays in group_alike(self._trained(layout)):
            parts = math.prod(num_parts(layout, axes) for axes in alike.spec)
            stored += num_arrays * part_bytes(layout, alike) * parts
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
