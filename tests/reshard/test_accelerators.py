"""Accelerators: every figure has a public source, and a wrong name is answered with the right ones."""

from __future__ import annotations

import pytest

from reshard.accelerators import ACCELERATORS, FIGURES, Accelerator, Figure, find_accelerator
from reshard.errors import UsageError

PUBLISHERS = (
    "https://docs.cloud.google.com/",
    "https://github.com/Cyclenerd/",
    "https://github.com/mlcommons/",
    "https://jax-ml.github.io/scaling-book/",
)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.name)
def test_table_has_a_public_source_for_each_figure(accelerator: Accelerator) -> None:
    for name in FIGURES:
        figure = accelerator.figure(name)
        assert figure is None or figure.source.startswith(PUBLISHERS), name


def test_table_has_all_that_the_issue_names() -> None:
    assert [accelerator.name for accelerator in ACCELERATORS] == [
        "tpu-v5e",
        "tpu-v5p",
        "tpu-v6e",
        "tpu-7x",
        "h100",
        "h200",
    ]


def test_table_says_what_is_not_published() -> None:
    missing = [(a.name, name) for a in ACCELERATORS for name in FIGURES if a.figure(name) is None]
    assert missing == [("tpu-7x", "host_copy_bytes_s")]
    assert find_accelerator("tpu-7x").value("host_copy_bytes_s") is None


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.name)
def test_figures_keep_the_order_of_memories_and_links(accelerator: Accelerator) -> None:
    """A slip of a thousand, or of bits for bytes, breaks what holds for all of them."""
    value = accelerator.value
    assert value("device_bandwidth_bytes_s") > value("interconnect_bytes_s") > 10e9  # type: ignore[operator]
    assert value("interconnect_bytes_s") > value("host_network_bytes_s") / value("chips_per_host")  # type: ignore[operator]
    assert 10e9 < value("device_memory_bytes") < value("host_memory_bytes") < 10e12  # type: ignore[operator]
    assert 100e12 < value("peak_flops_s") < 10e15  # type: ignore[operator]
    # A chip does between 100 and 1,000 operations on each byte that it reads.
    assert 100 < value("peak_flops_s") / value("device_bandwidth_bytes_s") < 1000  # type: ignore[operator]


def test_own_figures_replace_published_ones_and_keep_their_source() -> None:
    changed = find_accelerator("h100").with_figures({"host_network_bytes_s": 25e9}, source="the plan file")
    assert changed.figure("host_network_bytes_s") == Figure(25e9, "the plan file")
    assert changed.figure("host_memory_bytes") == find_accelerator("h100").figure("host_memory_bytes")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="known are tpu-v5e, tpu-v5p"):
        find_accelerator("tpu-v9")
    with pytest.raises(UsageError, match="one of chips_per_host, device_memory_bytes"):
        Accelerator(name="custom").with_figures({"memory": 1.0}, source="the plan file")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_figure_that_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match="not positive"):
        Figure(value, "https://example.org")
