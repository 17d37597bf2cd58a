"""Bytes are written for people in one way."""

import pytest

from reshard.sizes import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (6_710_886, "6.7 MB"),
        (999_960_000, "1.0 GB"),
        (4.5e9, "4.5 GB"),
        (-2_000_000, "-2.0 MB"),
        (3e15, "3000.0 TB"),
    ],
)
def test_size_has_the_largest_unit_that_leaves_it_at_least_one(num_bytes, text):
    assert format_bytes(num_bytes) == text
