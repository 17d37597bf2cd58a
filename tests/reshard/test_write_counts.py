import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, boxes

from reshard.boxes import contains, intersect
from reshard.errors import InvariantBrokenError
from reshard.write_counts import WriteCounts


@PROPERTY
@given(boxes(2), st.lists(boxes(2), max_size=6))
def test_write_counts_are_those_of_each_element(box, pieces):
    inside = [piece for piece in pieces if contains(box, piece)]
    counts = WriteCounts("w", box)
    for piece in inside:
        counts.add(piece)
    (first, last), (left, right) = box
    expected = [
        [sum(intersect(((i, i + 1), (j, j + 1)), p) is not None for p in inside) for j in range(left, right)]
        for i in range(first, last)
    ]
    assert counts.counts.tolist() == expected
    flat = [count for row in expected for count in row]
    for check, is_right in (
        (counts.check_once, all(count == 1 for count in flat)),
        (counts.check_at_most_once, all(count <= 1 for count in flat)),
    ):
        if is_right:
            check()
        else:
            with pytest.raises(InvariantBrokenError):
                check()


def test_write_counts_name_array_box_and_element():
    counts = WriteCounts("w", ((2, 5), (0, 4)))
    counts.add(((2, 4), (0, 4)))
    with pytest.raises(InvariantBrokenError, match=r"'w' \[2:5, 0:4\].* 0 to 1 times, \(4, 0\) 0 times"):
        counts.check_once()
    counts.check_at_most_once()


def test_write_outside_the_box_is_refused():
    with pytest.raises(InvariantBrokenError, match=r"\[1:3\] is written, which is not inside it"):
        WriteCounts("w", ((2, 5),)).add(((1, 3),))


def test_write_counts_of_a_scalar_and_of_nothing():
    scalar = WriteCounts("w", ())
    with pytest.raises(InvariantBrokenError, match="0 to 0 times"):
        scalar.check_once()
    scalar.add(())
    scalar.check_once()
    WriteCounts("w", ((3, 3), (0, 4))).check_once()


def test_write_counts_do_not_turn_over():
    counts = WriteCounts("w", ((0, 1),))
    for _ in range(257):
        counts.add(((0, 1),))
    assert counts.counts.tolist() == [np.iinfo(np.uint8).max]
