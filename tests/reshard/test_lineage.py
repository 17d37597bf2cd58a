"""A copy that a recovery went back behind is no longer the job's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY

from reshard.lineage import is_on_lineage


@pytest.mark.parametrize(
    ("restored_steps", "expected"),
    [({1: 0}, True), ({1: 0, 2: 59}, False), ({1: 0, 2: 60}, True), ({1: 0, 2: 61, 3: 40}, False)],
)
def test_copy_newer_than_what_a_later_generation_restored_is_abandoned(
    restored_steps: dict[int, int], expected: bool
) -> None:
    assert is_on_lineage(60, 1, restored_steps) is expected


@PROPERTY
@given(st.integers(0, 9), st.integers(1, 5), st.dictionaries(st.integers(1, 5), st.integers(0, 9)))
def test_copy_of_an_older_step_or_of_the_newest_generation_stays(
    step: int, generation: int, restored_steps: dict[int, int]
) -> None:
    newest = max([generation, *restored_steps])
    assert is_on_lineage(step, newest, restored_steps)
    if is_on_lineage(step, generation, restored_steps):
        assert all(is_on_lineage(older, generation, restored_steps) for older in range(step))
