import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, boxes, mask_of

from reshard.boxes import (
    BoxIndex,
    check_box,
    contains,
    full_box,
    intersect,
    is_covered,
    relative_slices,
    shape_of,
    subtract,
    uncovered,
    volume,
)
from reshard.errors import UsageError

SIZE = 5
pairs = st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank)))
families = st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), st.lists(boxes(rank), max_size=6)))


def model(*some_boxes):
    return mask_of((SIZE,) * len(some_boxes[0]), some_boxes)


@PROPERTY
@given(pairs)
def test_intersect_holds_exactly_the_common_elements_for_any_boxes(pair):
    a, b = pair
    common = intersect(a, b)
    expected = model(a) & model(b)
    if common is None:
        assert not expected.any()
    else:
        assert volume(common) > 0
        np.testing.assert_array_equal(model(common), expected)


@PROPERTY
@given(pairs)
def test_subtract_gives_disjoint_boxes_of_exactly_the_rest_for_any_boxes(pair):
    box, hole = pair
    pieces = subtract(box, hole)
    rest = model(box) & ~model(hole)
    assert all(volume(piece) > 0 for piece in pieces)
    assert sum(volume(piece) for piece in pieces) == rest.sum()
    if pieces:
        np.testing.assert_array_equal(model(*pieces), rest)


@PROPERTY
@given(families)
def test_uncovered_gives_disjoint_boxes_of_what_no_box_has_for_any_family(family):
    box, others = family
    missing = uncovered(box, others)
    expected = model(box) & ~model(*others) if others else model(box)
    assert sum(volume(piece) for piece in missing) == expected.sum()
    if missing:
        np.testing.assert_array_equal(model(*missing), expected)
    assert is_covered(box, others) == (not expected.any())


@PROPERTY
@given(families)
def test_box_index_finds_the_same_boxes_as_looking_at_all_for_any_family(family):
    region, others = family
    expected = sorted({box for box in others if intersect(box, region) is not None})
    assert list(BoxIndex(others).overlapping(region)) == expected


@PROPERTY
@given(st.lists(st.lists(st.integers(0, SIZE), min_size=4, max_size=4).map(sorted), max_size=3))
def test_relative_slices_select_the_piece_inside_a_buffer_of_the_box(ends):
    outer, piece = tuple((e[0], e[3]) for e in ends), tuple((e[1], e[2]) for e in ends)
    whole = np.arange(SIZE ** len(outer)).reshape((SIZE,) * len(outer))
    buffer = whole[tuple(slice(*dim) for dim in outer)]
    expected = whole[tuple(slice(*dim) for dim in piece)]
    np.testing.assert_array_equal(buffer[relative_slices(piece, outer)], expected)


def test_scalar_box_has_one_element_that_only_a_scalar_covers():
    assert volume(()) == 1
    assert shape_of(()) == ()
    assert full_box(()) == ()
    assert intersect((), ()) == ()
    assert subtract((), ()) == ()
    assert uncovered((), []) == ((),)
    assert is_covered((), [()])
    assert relative_slices((), ()) == ()


def test_empty_box_has_no_elements_and_is_covered_by_nothing():
    empty = ((2, 2), (0, 3))
    assert volume(empty) == 0
    assert intersect(empty, ((0, 4), (0, 4))) is None
    assert subtract(empty, ((0, 4), (0, 4))) == ()
    assert is_covered(empty, [])


def test_contains_compares_ranges_in_every_dim():
    assert contains(((0, 4), (2, 8)), ((1, 4), (2, 3)))
    assert not contains(((0, 4), (2, 8)), ((1, 5), (2, 3)))
    assert not contains(((0, 4), (2, 8)), ((1, 4), (1, 3)))


@pytest.mark.parametrize("box", [((3, 2),), ((-1, 2),)])
def test_check_box_refuses_a_malformed_range(box):
    with pytest.raises(UsageError, match="is not a box"):
        check_box(box)


@pytest.mark.parametrize("box", [((0, 4),), ((0, 4), (0, 6)), ()])
def test_check_box_refuses_a_box_outside_the_array(box):
    with pytest.raises(UsageError, match="outside an array of shape"):
        check_box(box, (4, 5))


@pytest.mark.parametrize("piece", [((0, 5),), ((1, 3), (0, 1))])
def test_relative_slices_refuse_a_piece_outside_the_box(piece):
    with pytest.raises(UsageError, match="is not inside box"):
        relative_slices(piece, ((0, 4),))
