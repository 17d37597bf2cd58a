"""What a plan file describes, worked out: machine, rates, layout, and who keeps which snapshot shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic.plan_file import ClusterTable, PlanFile
from elastic.plan_model import describe_model, lay_out
from reshard.accelerators import Accelerator, find_accelerator
from reshard.cost import Rates
from reshard.errors import UsageError
from reshard.grid import Column, as_boxes, slice_column
from reshard.holdings import Shard
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.redundancy import buddy_stock, capture_stock
from reshard.step_cost import StepPredictor, Workload
from reshard.stock import Stock

STEP = 0
"""The step that all snapshots of a plan are of; which one it is makes no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Who keeps what of a snapshot: what hosts capture themselves, and copies they keep for other slices."""

    captured: Stock
    copies: Stock

    def all(self) -> Stock:
        """Return both."""
        return self.captured.merged(self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A described job on its whole cluster; `shm_bytes` is what a host has for snapshots, None if unknown."""

    plan: PlanFile
    accelerator: Accelerator
    chips_per_host: int
    rates: Rates
    layout: Layout
    step: StepPredictor
    shm_bytes: float | None

    @classmethod
    def of(cls, plan: PlanFile) -> Setting:
        """Work out a plan file; raises `UsageError` where its parts do not fit together."""
        accelerator = describe_accelerator(plan.cluster)
        chips = accelerator.value("chips_per_host")
        if chips is None or chips != int(chips):
            raise UsageError(
                f"cluster.figures.chips_per_host is {chips}, it must be a whole number",
                remedy="Give chips_per_host in [cluster.figures].",
            )
        least, there_are = plan.recovery.min_slices, plan.cluster.slices
        if least > there_are:
            raise UsageError(
                f"recovery.min_slices is {least}, the cluster has {there_are} slices",
                remedy="Give min_slices from 1 to cluster.slices; below it the job waits.",
                key="recovery.min_slices",
            )
        model = describe_model(plan.model)
        layout = lay_out(plan.cluster, plan.mesh, int(chips), model)
        for axis in plan.training.batch_axes:
            layout.mesh.axis_size(axis)
        workload = Workload(
            global_batch=plan.training.global_batch,
            batch_axes=plan.training.batch_axes,
            step_s=plan.training.step_s,
            compute_s=least_compute_s(plan, accelerator, model.active_parameters, layout.mesh.num_devices),
            gradient_paths=model.gradient_paths,
        )
        rates = Rates.of(accelerator, request_s=plan.cluster.request_s)
        memory = accelerator.value("host_memory_bytes")
        shm = plan.cluster.shm_bytes
        return cls(
            plan=plan,
            accelerator=accelerator,
            chips_per_host=int(chips),
            rates=rates,
            layout=layout,
            step=StepPredictor(layout, workload, rates),
            # A tmpfs has half of the memory unless it is mounted with another size.
            shm_bytes=shm if shm is not None or memory is None else memory / 2,
        )

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Every host of the cluster."""
        return self.layout.mesh.distinct_hosts()

    def keep(self, layout: Layout) -> Kept:
        """Return who keeps which shards when the job runs on `layout`."""
        replicas = self.plan.snapshots.replicas
        return Kept(captured=capture_stock(layout, replicas), copies=buddy_stock(layout, replicas))


def describe_accelerator(cluster: ClusterTable) -> Accelerator:
    """Return the named accelerator with the file's own figures; `custom` has no others."""
    if cluster.accelerator == "custom":
        accelerator = Accelerator(name="custom")
    else:
        accelerator = find_accelerator(cluster.accelerator)
    figures: dict[str, float] = dict(cluster.figures.items())
    return accelerator.with_figures(figures, source="the plan file")


def least_compute_s(
    plan: PlanFile, accelerator: Accelerator, active_parameters: int | None, num_devices: int
) -> float | None:
    """Return the seconds that a step's operations take on the whole cluster; None when it is not told.

    6 operations for each parameter that a token passes through, at the part of the peak that the file says.
    Attention itself is left out. Source: https://arxiv.org/abs/2001.08361, section 2.1.
    """
    training = plan.training
    peak = accelerator.value("peak_flops_s")
    if training.tokens_per_row is None or active_parameters is None or peak is None:
        return None
    operations = 6.0 * active_parameters * training.global_batch * training.tokens_per_row
    return operations / (num_devices * peak * training.utilisation)


def sole_holders(stock: Stock) -> dict[int, Shard]:
    """Return the slices that alone hold something, with the first such array and its first such box.

    Boxes of one array must not overlap unless they are equal, as is so for those of one layout.
    """
    found: dict[int, Shard] = {}
    for path, ranges, number, slices in _holders(stock):
        lowest, highest = np.full(len(ranges), np.iinfo(np.int64).max), np.full(len(ranges), -1)
        np.minimum.at(lowest, number, slices)
        np.maximum.at(highest, number, slices)
        alone = np.flatnonzero((lowest == highest) & _filled(ranges))
        for slice_index, box in zip(lowest[alone].tolist(), as_boxes(ranges[alone]), strict=True):
            found.setdefault(slice_index, (path, box))
    return dict(sorted(found.items()))


def held_only_by(stock: Stock, slices: Collection[int]) -> Shard | None:
    """Return the first array and its first box that these slices hold and no other, None without one.

    Boxes of one array must not overlap unless they are equal, as for `sole_holders`.
    """
    for path, ranges, number, holders in _holders(stock):
        is_kept = np.zeros(len(ranges), bool)
        is_kept[number[~np.isin(holders, list(slices))]] = True
        for box in as_boxes(ranges[np.flatnonzero(~is_kept & _filled(ranges))[:1]]):
            return path, box
    return None


def _filled(ranges: Column) -> NDArray[np.bool_]:
    filled: NDArray[np.bool_] = np.logical_and.reduce(ranges[:, :, 1] > ranges[:, :, 0], axis=1)
    return filled


def _holders(stock: Stock) -> Iterator[tuple[str, Column, Column, Column]]:
    """Yield a path, the distinct boxes held of it `[m, rank, 2]`, and who holds which: the numbers of
    boxes `[n]` and the slices `[n]`; once for all arrays held alike.
    """
    groups_of: defaultdict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(stock.groups):
        for path in group.paths:
            groups_of[path].append(index)
    first = {tuple(indices): path for path, indices in sorted(groups_of.items(), reverse=True)}
    slice_of = slice_column(stock.hosts)
    for indices, path in sorted(first.items(), key=lambda item: item[1]):
        groups = [stock.groups[index] for index in indices]
        boxes = np.concatenate([group.boxes[group.box] for group in groups])
        distinct, number = np.unique(boxes.reshape(len(boxes), -1), axis=0, return_inverse=True)
        ranges = distinct.reshape(len(distinct), boxes.shape[1], 2)
        yield path, ranges, number.ravel(), slice_of[np.concatenate([group.host for group in groups])]
