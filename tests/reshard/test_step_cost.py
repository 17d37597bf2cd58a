"""The step on fewer slices: compute, the exchange of gradients, and what is not known."""

from __future__ import annotations

import pytest

from reshard.choice_figures import Costs, Figures
from reshard.cost import Rates
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.step_cost import StepPredictor, Workload

RATES = Rates(network_bytes_s=10e9, copy_bytes_s=5e9)
FIGURES = Figures(
    num_slices=3,
    num_hosts=6,
    num_devices=12,
    num_devices_before=16,
    device_bytes=5_000_000_000,
    snapshot_bytes=0,
    bytes_moved=40_000_000_000,
    host_bytes_received=20_000_000_000,
    replicated_bytes=0,
    padding_factor=1.0,
)


def job(num_slices: int, *, hosts_per_slice: int = 2, arrays: tuple[ArrayLayout, ...] = ()) -> Layout:
    """Slices of `hosts_per_slice` hosts with two devices: axis `data` over slices, `model` inside one."""
    hosts = [HostId(s, h) for s in range(num_slices) for h in range(hosts_per_slice)]
    mesh = MeshLayout(
        axis_names=("data", "model"),
        axis_sizes=(num_slices, 2 * hosts_per_slice),
        hosts=tuple(host for host in hosts for _ in range(2)),
    )
    return Layout(mesh=mesh, arrays=arrays, elastic_axis="data")


def weights(spec: tuple[tuple[str, ...], ...] = ((), ("model",)), path: str = "w") -> ArrayLayout:
    return ArrayLayout(path=path, shape=(12, 1000), dtype="float32", itemsize=4, spec=spec)


def test_compute_grows_as_chips_are_lost() -> None:
    workload = Workload(global_batch=48, batch_axes=("data",), step_s=3.0)
    step = StepPredictor(job(4), workload, RATES).step(job(3))
    assert step.ratio == pytest.approx(4 / 3)
    assert (step.seconds, step.bound) == (pytest.approx(4.0), "compute")


def test_compute_counts_padding_rows_as_work() -> None:
    """50 rows are 13 on each of 4 replicas, and 17 on each of 3."""
    workload = Workload(global_batch=50, batch_axes=("data",), step_s=13.0)
    assert StepPredictor(job(4), workload, RATES).step(job(3)).seconds == pytest.approx(17.0)


def test_exchange_of_gradients_bounds_a_short_step() -> None:
    """A ring over S slices sends 2 (S - 1) / S of 48 kB from each, over two hosts."""
    layout = job(4, arrays=(weights(),))
    rates = Rates(network_bytes_s=1000.0)
    workload = Workload(global_batch=4, batch_axes=("data",), compute_s=1.0)
    step = StepPredictor(layout, workload, rates).step(layout)
    assert step.exchange_s == pytest.approx(1.5 * 48_000 / 2000)
    assert (step.bound, step.seconds) == ("exchange", step.exchange_s)


def test_measured_step_is_believed_where_the_exchange_would_take_longer() -> None:
    """Over two slices a ring sends 2 × 1 / 2 of the bytes, over four 2 × 3 / 4."""
    arrays = (weights(),)
    workload = Workload(global_batch=4, batch_axes=("data",), step_s=3.0)
    predictor = StepPredictor(job(4, arrays=arrays), workload, Rates(network_bytes_s=1000.0))
    assert predictor.step(job(4, arrays=arrays)).seconds == pytest.approx(3.0)
    assert predictor.step(job(2, arrays=arrays)).exchange_s == pytest.approx(2.0)


def test_exchange_leaves_out_what_is_partitioned_over_slices_and_what_has_no_gradient() -> None:
    arrays = (weights(), weights((("data",), ()), "experts"), weights(path="mu"))
    workload = Workload(global_batch=4, batch_axes=("data",), gradient_paths=("w", "experts"))
    layout = job(2, arrays=arrays)
    step = StepPredictor(layout, workload, Rates(network_bytes_s=1000.0)).step(layout)
    assert step.exchange_s == pytest.approx(48_000 / 2000)


def test_step_without_a_known_time_is_a_ratio_only() -> None:
    workload = Workload(global_batch=48, batch_axes=("data",))
    step = StepPredictor(job(4), workload, Rates()).step(job(2))
    assert (step.ratio, step.seconds, step.exchange_s) == (2.0, None, None)


def test_compute_counts_elements_that_fill_up_an_array_as_work() -> None:
    """10 rows over 4 parts are stored as 12."""
    padded = ArrayLayout(
        path="w", shape=(10, 8), dtype="float32", itemsize=4, spec=(("data",), ()), padded=True
    )
    workload = Workload(global_batch=20, batch_axes=("data",), step_s=1.0)
    step = StepPredictor(job(2, arrays=(padded,)), workload, Rates()).step(job(4, arrays=(padded,)))
    assert step.ratio == pytest.approx(0.5 * 12 / 10)


def test_layout_choice_is_told_step_and_move_in_seconds() -> None:
    workload = Workload(global_batch=48, batch_axes=("data",), step_s=3.0)
    costs: Costs = StepPredictor(job(4), workload, RATES)
    assert costs.step_s(job(3), FIGURES) == pytest.approx(4.0)
    assert costs.move_s(job(3), FIGURES) == pytest.approx(2.0 + 1.0)


def test_layout_choice_weighs_a_step_of_one_second_when_none_is_known() -> None:
    costs = StepPredictor(job(4), Workload(global_batch=48, batch_axes=("data",)), Rates())
    assert costs.step_s(job(2), FIGURES) == pytest.approx(2.0)
    assert costs.move_s(job(2), FIGURES) == 0.0


def test_workload_that_is_not_positive_is_refused() -> None:
    with pytest.raises(UsageError, match="positive batch"):
        Workload(global_batch=0, batch_axes=())
