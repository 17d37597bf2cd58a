import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, boxes, mask_of

from reshard.coverage import newest_covered_step, uncovered_at
from reshard.errors import UsageError
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import ArrayLayout


def array(path, *shape):
    return ArrayLayout(path=path, shape=shape, dtype="float32", itemsize=4)


def held(step, path, box, host=0):
    return Holding(host=HostId(host), step=step, path=path, box=box, checksum=0, tier="shm")


@st.composite
def situations(draw):
    arrays = [array(f"a{index}", *(5,) * draw(st.integers(0, 2))) for index in range(draw(st.integers(1, 2)))]
    shard = st.sampled_from(arrays).flatmap(
        lambda arr: st.builds(held, st.integers(0, 3), st.just(arr.path), boxes(len(arr.shape)))
    )
    return arrays, draw(st.lists(shard, max_size=12))


@PROPERTY
@given(situations())
def test_newest_covered_step_is_the_last_whose_boxes_fill_every_array(situation):
    arrays, holdings = situation

    def filled(step, arr):
        own = [h.box for h in holdings if (h.step, h.path) == (step, arr.path)]
        return mask_of(arr.shape, own).all()

    complete = [step for step in {h.step for h in holdings} if all(filled(step, arr) for arr in arrays)]
    assert newest_covered_step(arrays, holdings) == max(complete, default=None)


@PROPERTY
@given(situations(), st.integers(0, 3))
def test_uncovered_at_lists_exactly_the_missing_elements_of_a_step(situation, step):
    arrays, holdings = situation
    gaps = uncovered_at(arrays, holdings, step=step)
    for arr in arrays:
        own = [h.box for h in holdings if (h.step, h.path) == (step, arr.path)]
        np.testing.assert_array_equal(mask_of(arr.shape, gaps.get(arr.path, ())), ~mask_of(arr.shape, own))
        assert arr.path not in gaps or gaps[arr.path]


def test_newest_covered_step_falls_back_when_the_newest_is_incomplete():
    arrays = [array("w", 4), array("b", 2)]
    old = [held(10, "w", ((0, 2),)), held(10, "w", ((2, 4),), host=1), held(10, "b", ((0, 2),))]
    torn = [held(11, "w", ((0, 4),))]
    assert newest_covered_step(arrays, old + torn) == 10
    assert uncovered_at(arrays, old + torn, step=11) == {"b": (((0, 2),),)}


def test_newest_covered_step_never_joins_halves_of_two_steps():
    assert newest_covered_step([array("w", 4)], [held(10, "w", ((0, 2),)), held(11, "w", ((2, 4),))]) is None


def test_newest_covered_step_ignores_arrays_that_are_not_asked_for():
    assert newest_covered_step([array("w", 4)], [held(3, "w", ((0, 4),)), held(4, "other", ((0, 4),))]) == 3


def test_newest_covered_step_needs_no_holding_of_an_empty_array():
    assert newest_covered_step([array("w", 4), array("none", 0, 4)], [held(3, "w", ((0, 4),))]) == 3


def test_coverage_refuses_a_holding_outside_its_array():
    with pytest.raises(UsageError, match="outside an array of shape"):
        newest_covered_step([array("w", 4)], [held(3, "w", ((0, 8),))])
    with pytest.raises(UsageError, match="outside an array of shape"):
        uncovered_at([array("w", 4)], [held(3, "w", ())], step=3)
