"""What a change of topology does to the step: the same work on fewer chips, and gradients over fewer slices.

compute  = before × (rows a replica × replicas / chips × padding, after) / (the same before)
exchange = that of the gradients in `reshard.cost.ring_exchange_s`
step     = max(compute, exchange): they overlap
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from reshard.candidates import Groups, group_arrays
from reshard.choice_figures import Figures
from reshard.cost import Rates, predict_restore, predict_transfer, ring_exchange_s
from reshard.errors import UsageError
from reshard.fits import part_shape
from reshard.layout import Layout

__all__ = ["StepCost", "StepPredictor", "Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step works on: rows of the global batch over `batch_axes`, and the time it takes where known.

    `step_s` is that of a measured step; without one, `compute_s` is what its compute takes at least.
    `gradient_paths` are the arrays whose gradients are summed over the replicas; None stands for all.
    """

    global_batch: int
    batch_axes: tuple[str, ...]
    step_s: float | None = None
    compute_s: float | None = None
    gradient_paths: Collection[str] | None = None

    def __post_init__(self) -> None:
        times = (self.step_s, self.compute_s)
        if self.global_batch < 1 or any(time_s is not None and not time_s > 0 for time_s in times):
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
        self._compute_s = workload.compute_s if workload.step_s is None else workload.step_s
        self._part_exchanged = 1.0
        exchange_s = self._exchange_s(reference)
        if workload.step_s is not None and exchange_s is not None and exchange_s > workload.step_s:
            # The step was seen to be shorter: what is really exchanged is less (a smaller dtype, say).
            self._part_exchanged = workload.step_s / exchange_s

    def step(self, layout: Layout) -> StepCost:
        """Return the predicted step of `layout`."""
        ratio = self._work_per_device(layout) / self._work
        exchange_s = self._exchange_s(layout)
        return StepCost(
            ratio=ratio,
            compute_s=None if self._compute_s is None else self._compute_s * ratio,
            exchange_s=None if exchange_s is None else exchange_s * self._part_exchanged,
        )

    def step_s(self, layout: Layout, figures: Figures) -> float:
        """See `reshard.choice_figures.Costs`."""
        step = self.step(layout)
        return step.ratio if step.seconds is None else step.seconds

    def move_s(self, layout: Layout, figures: Figures) -> float:
        """See `reshard.choice_figures.Costs`: transfer to the host that receives most, then restore."""
        received = {layout.mesh.distinct_hosts()[0]: figures.host_bytes_received}
        transfer = predict_transfer(self._rates, {}, received).seconds
        return (transfer or 0.0) + (predict_restore(self._rates, figures.device_bytes).seconds or 0.0)

    def _work_per_device(self, layout: Layout) -> float:
        sizes = layout.mesh.sizes()
        num_replicas = math.prod(layout.mesh.axis_size(axis) for axis in self._workload.batch_axes)
        rows = -(-self._workload.global_batch // num_replicas)
        stored = real = 0
        for alike, paths in self._trained(layout).items():
            num_parts = math.prod(sizes[axis] for axes in alike.spec for axis in axes)
            part = math.prod(part_shape(alike.shape, alike.spec, sizes))
            stored += len(paths) * part * num_parts * alike.itemsize
            real += len(paths) * math.prod(alike.shape) * alike.itemsize
        return rows * num_replicas / layout.mesh.num_devices * (stored / real if real else 1.0)

    def _exchange_s(self, layout: Layout) -> float | None:
        if self._rates.network_bytes_s is None:
            return None
        nbytes = sum(
            len(paths) * math.prod(alike.shape) * alike.itemsize
            for alike, paths in self._trained(layout).items()
            if all(layout.elastic_axis not in axes for axes in alike.spec)
        )
        return ring_exchange_s(
            nbytes,
            num_slices=layout.mesh.num_slices,
            num_hosts=len(layout.mesh.distinct_hosts()),
            network_bytes_s=self._rates.network_bytes_s,
        )

    def _trained(self, layout: Layout) -> Groups:
        paths = self._workload.gradient_paths
        return group_arrays(array for array in layout.arrays if paths is None or array.path in paths)
