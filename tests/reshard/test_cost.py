"""The cost model: its formulae, what bounds each phase, and what it does not know."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import layout_pairs

from reshard.accelerators import Accelerator, find_accelerator
from reshard.cost import (
    Rates,
    device_bytes,
    goodput,
    predict_restore,
    predict_transfer,
)
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout

A, B, C = HostId(0), HostId(1), HostId(2)
RATES = Rates(network_bytes_s=10e9, copy_bytes_s=5e9)


def test_transfer_is_bound_by_the_host_that_receives_most() -> None:
    phase = predict_transfer(RATES, {A: 10e9, B: 10e9}, {C: 20e9})
    assert phase.seconds == pytest.approx(2.0)
    assert phase.bound == "s2h0 receives 20.0 GB at 10.0 GB/s"


def test_transfer_is_bound_by_the_host_that_sends_most() -> None:
    phase = predict_transfer(RATES, {A: 30e9}, {B: 15e9, C: 15e9})
    assert phase.seconds == pytest.approx(3.0)
    assert phase.bound.startswith("s0h0 sends 30.0 GB")


def test_transfer_pays_for_each_request() -> None:
    rates = dataclasses.replace(RATES, request_s=0.01)
    assert predict_transfer(rates, {A: 10e9}, {B: 10e9}, num_requests=50).seconds == pytest.approx(1.5)


def test_transfer_of_nothing_takes_no_time() -> None:
    assert predict_transfer(Rates(), {}, {}).seconds == 0.0


def test_phases_say_what_is_missing_when_a_rate_is_not_known() -> None:
    transfer = predict_transfer(Rates(), {A: 1}, {B: 1})
    assert (transfer.seconds, "network rate is not known" in transfer.bound) == (None, True)
    restore = predict_restore(Rates.of(find_accelerator("tpu-7x")), 10)
    assert (restore.seconds, "from host to device is not known" in restore.bound) == (None, True)


def test_restore_is_the_fullest_device_over_the_copy_rate_of_a_chip() -> None:
    phase = predict_restore(RATES, 10_000_000_000)
    assert (phase.seconds, phase.bound) == (pytest.approx(2.0), "10.0 GB to each device at 5.0 GB/s")


def test_rates_are_the_published_ones() -> None:
    rates = Rates.of(find_accelerator("tpu-v5p"), request_s=0.001)
    assert rates == Rates(network_bytes_s=25e9, copy_bytes_s=16e9, request_s=0.001)
    assert Rates.of(Accelerator(name="custom")) == Rates()


@given(layout_pairs())
def test_device_bytes_are_those_of_the_fullest_device(pair: tuple[Layout, Layout]) -> None:
    layout = pair[0]
    by_position = np.zeros(layout.mesh.num_devices, np.int64)
    for array in layout.arrays:
        by_position += [array.box_nbytes(box) for box in layout.boxes(array)]
    assert device_bytes(layout) == by_position.max()


def test_goodput_of_a_cluster_that_is_down_a_tenth_of_the_time() -> None:
    assert goodput(mtbf_s=100.0, downtime_s=10.0) == pytest.approx(0.9)


def test_goodput_counts_slow_steps_until_the_slice_is_back() -> None:
    assert goodput(mtbf_s=100.0, downtime_s=10.0, slow_s=40.0, slow_ratio=2.0) == pytest.approx(0.7)


@given(
    st.floats(1.0, 1e6), st.floats(0.0, 1e7), st.floats(0.0, 1e7), st.floats(1.0, 10.0), st.floats(0.0, 0.9)
)
def test_goodput_is_a_part_of_the_time(
    mtbf_s: float, downtime_s: float, slow_s: float, slow_ratio: float, overhead: float
) -> None:
    value = goodput(
        mtbf_s=mtbf_s, downtime_s=downtime_s, slow_s=slow_s, slow_ratio=slow_ratio, overhead=overhead
    )
    assert 0.0 <= value <= 1.0 - overhead + 1e-12


@pytest.mark.parametrize(
    "wrong",
    [
        {"mtbf_s": 0.0, "downtime_s": 1.0},
        {"mtbf_s": 1.0, "downtime_s": -1.0},
        {"mtbf_s": 1.0, "downtime_s": 0.0, "slow_ratio": 0.5},
    ],
)
def test_goodput_of_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="no goodput"):
        goodput(**wrong)


def test_rates_that_are_not_positive_are_refused() -> None:
    with pytest.raises(UsageError, match="rates must be positive"):
        Rates(network_bytes_s=0.0)
