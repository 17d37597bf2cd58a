"""What common accelerators and their hosts can do, each figure with its public source.

A *host* is what runs one agent: for TPUs a virtual machine with four chips (what slices of several hosts are
made of), for GPUs a machine with eight. Bandwidths are one way: where a page gives the sum of both
directions, half of it stands here, and the note says so. "GB" in a source is read as 10^9 bytes, "GiB" as
2^30. What nobody has published is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from reshard.errors import UsageError

__all__ = ["ACCELERATORS", "FIGURES", "Accelerator", "Figure", "find_accelerator"]

_TPU_TABLE = "https://docs.cloud.google.com/tpu/docs/tpu7x"  # compares v5p, v6e and 7x
_TPU_V5E = "https://docs.cloud.google.com/tpu/docs/v5e"
_V5E_MACHINES = "https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator/issues/89"
_BOOK_TPUS = "https://jax-ml.github.io/scaling-book/tpus/"
_BOOK_GPUS = "https://jax-ml.github.io/scaling-book/gpus/"
_MLPERF = "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/"
_DGX_H100 = _MLPERF + "DGX-H100_H100-SXM-80GBx8_TRT.json"
_H200 = _MLPERF + "H200-SXM-141GBx8_TRT.json"

_BOTH_WAYS = "half of the {} GB/s of both directions"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, where it comes from (a URL, or the plan file that gave it), and how it was read there."""

    value: float
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise UsageError(f"a figure of {self.source} is {self.value}, not positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of accelerator with its host; None where no public figure exists.

    `device_memory_bytes`, `device_bandwidth_bytes_s` (its own memory), `interconnect_bytes_s` (to other chips
    of the slice), `host_copy_bytes_s` (between host and device memory) and `peak_flops_s` (bfloat16, dense)
    are of one chip; `host_network_bytes_s` (to other hosts) and `host_memory_bytes` of one host.
    """

    name: str
    chips_per_host: Figure | None = None
    device_memory_bytes: Figure | None = None
    device_bandwidth_bytes_s: Figure | None = None
    interconnect_bytes_s: Figure | None = None
    host_network_bytes_s: Figure | None = None
    host_memory_bytes: Figure | None = None
    host_copy_bytes_s: Figure | None = None
    peak_flops_s: Figure | None = None

    def figure(self, name: str) -> Figure | None:
        """Return the figure of this name, None when it is not published; `UsageError` for no such figure."""
        if name not in FIGURES:
            raise UsageError(f"{name!r} is not a figure; one of {', '.join(FIGURES)}", name=name)
        found: Figure | None = getattr(self, name)
        return found

    def value(self, name: str) -> float | None:
        """Return the value of a figure, None when it is not published."""
        found = self.figure(name)
        return None if found is None else found.value

    def with_figures(self, values: Mapping[str, float], *, source: str) -> Accelerator:
        """Return it with other values for some figures, which come from `source`."""
        for name in values:
            self.figure(name)
        given: dict[str, Any] = {name: Figure(value, source) for name, value in values.items()}
        return replace(self, **given)


FIGURES: tuple[str, ...] = tuple(field.name for field in fields(Accelerator) if field.name != "name")
"""The names of the figures, in the order of the table."""

_TPU_V5E_CHIP = Accelerator(
    name="tpu-v5e",
    chips_per_host=Figure(4, _V5E_MACHINES, "machine type ct5lp-hightpu-4t"),
    device_memory_bytes=Figure(16e9, _TPU_V5E),
    device_bandwidth_bytes_s=Figure(819e9, _TPU_V5E),
    interconnect_bytes_s=Figure(200e9, _TPU_V5E, _BOTH_WAYS.format(400)),
    host_network_bytes_s=Figure(12.5e9, _TPU_V5E, "6.4 Tb/s a pod of 256 chips, times four chips"),
    host_memory_bytes=Figure(192e9, _V5E_MACHINES, "machine type ct5lp-hightpu-4t"),
    host_copy_bytes_s=Figure(16e9, _BOOK_TPUS),
    peak_flops_s=Figure(197e12, _TPU_V5E),
)
_TPU_V5P_CHIP = Accelerator(
    name="tpu-v5p",
    chips_per_host=Figure(4, _TPU_TABLE),
    device_memory_bytes=Figure(95 * 2**30, _TPU_TABLE),
    device_bandwidth_bytes_s=Figure(2765e9, _TPU_TABLE),
    interconnect_bytes_s=Figure(600e9, _TPU_TABLE, _BOTH_WAYS.format(1200)),
    host_network_bytes_s=Figure(25e9, _TPU_TABLE, "50 Gb/s a chip, times four chips"),
    host_memory_bytes=Figure(448e9, _TPU_TABLE),
    host_copy_bytes_s=Figure(16e9, _BOOK_TPUS),
    peak_flops_s=Figure(459e12, _TPU_TABLE),
)
_TPU_V6E_CHIP = Accelerator(
    name="tpu-v6e",
    chips_per_host=Figure(4, _TPU_TABLE),
    device_memory_bytes=Figure(32 * 2**30, _TPU_TABLE),
    device_bandwidth_bytes_s=Figure(1638e9, _TPU_TABLE),
    interconnect_bytes_s=Figure(400e9, _TPU_TABLE, _BOTH_WAYS.format(800)),
    host_network_bytes_s=Figure(50e9, _TPU_TABLE, "100 Gb/s a chip, times four chips"),
    host_memory_bytes=Figure(720e9, _TPU_TABLE),
    host_copy_bytes_s=Figure(32e9, _BOOK_TPUS),
    peak_flops_s=Figure(918e12, _TPU_TABLE),
)
_TPU_7X_CHIP = Accelerator(
    name="tpu-7x",
    chips_per_host=Figure(4, _TPU_TABLE),
    device_memory_bytes=Figure(192 * 2**30, _TPU_TABLE),
    device_bandwidth_bytes_s=Figure(7380e9, _TPU_TABLE),
    interconnect_bytes_s=Figure(600e9, _TPU_TABLE, _BOTH_WAYS.format(1200)),
    host_network_bytes_s=Figure(50e9, _TPU_TABLE, "100 Gb/s a chip, times four chips"),
    host_memory_bytes=Figure(960e9, _TPU_TABLE),
    host_copy_bytes_s=None,
    peak_flops_s=Figure(2307e12, _TPU_TABLE),
)
_H100_CHIP = Accelerator(
    name="h100",
    chips_per_host=Figure(8, _DGX_H100),
    device_memory_bytes=Figure(80e9, _DGX_H100),
    device_bandwidth_bytes_s=Figure(3350e9, _BOOK_GPUS),
    interconnect_bytes_s=Figure(450e9, _DGX_H100, _BOTH_WAYS.format(900)),
    host_network_bytes_s=Figure(400e9, _BOOK_GPUS, "eight cards of 400 Gb/s (InfiniBand), one a GPU"),
    host_memory_bytes=Figure(2e12, _DGX_H100),
    host_copy_bytes_s=Figure(63e9, _DGX_H100, "504 GB/s for eight GPUs"),
    peak_flops_s=Figure(990e12, _BOOK_GPUS),
)
_H200_CHIP = replace(
    _H100_CHIP,
    name="h200",
    chips_per_host=Figure(8, _H200),
    device_memory_bytes=Figure(141e9, _H200),
    device_bandwidth_bytes_s=Figure(4800e9, _BOOK_GPUS),
    interconnect_bytes_s=Figure(450e9, _H200, _BOTH_WAYS.format(900)),
    host_memory_bytes=Figure(2e12, _H200),
    host_copy_bytes_s=Figure(63e9, _H200, "504 GB/s for eight GPUs"),
)

ACCELERATORS: tuple[Accelerator, ...] = (
    _TPU_V5E_CHIP,
    _TPU_V5P_CHIP,
    _TPU_V6E_CHIP,
    _TPU_7X_CHIP,
    _H100_CHIP,
    _H200_CHIP,
)
"""The accelerators with published figures."""


def find_accelerator(name: str) -> Accelerator:
    """Return the accelerator of this name; raises `UsageError` that lists the names when there is none."""
    for accelerator in ACCELERATORS:
        if accelerator.name == name:
            return accelerator
    known = ", ".join(accelerator.name for accelerator in ACCELERATORS)
    raise UsageError(
        f"no accelerator is called {name!r}; known are {known}",
        remedy='Name one of them, or write accelerator = "custom" and give its figures.',
        name=name,
    )
