"""The state digest is equal if and only if every leaf's path, dtype, shape and bytes are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from snapshot.digest import state_digest

LEAVES = [("a", "float32", (2, 2), bytes(16)), ("b", "int8", (3,), b"xyz"), ("c", "float32", (0,), b"")]


@given(st.permutations(LEAVES))
def test_digest_does_not_depend_on_the_order_of_leaves(
    leaves: list[tuple[str, str, tuple[int, ...], bytes]],
) -> None:
    assert state_digest(leaves) == state_digest(LEAVES)


@pytest.mark.parametrize(
    "leaf",
    [
        ("aa", "float32", (2, 2), bytes(16)),
        ("a", "int32", (2, 2), bytes(16)),
        ("a", "float32", (4, 1), bytes(16)),
        ("a", "float32", (2, 2), bytes(15) + b"\1"),
    ],
)
def test_digest_changes_with_path_dtype_shape_and_bytes(
    leaf: tuple[str, str, tuple[int, ...], bytes],
) -> None:
    assert state_digest([leaf, *LEAVES[1:]]) != state_digest(LEAVES)


def test_digest_takes_any_contiguous_buffer() -> None:
    array = np.arange(4, dtype=np.uint8)
    assert state_digest([("a", "uint8", (4,), array)]) == state_digest(
        [("a", "uint8", (4,), array.tobytes())]
    )


def test_digest_refuses_a_path_twice() -> None:
    with pytest.raises(UsageError, match="twice"):
        state_digest([LEAVES[0], LEAVES[0]])
