import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY

from reshard.runs import Runs, spread

lists = st.lists(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), max_size=3), max_size=12)


def runs_of(lists_of_pairs):
    values = np.array([pair for run in lists_of_pairs for pair in run], np.int64).reshape(-1, 2)
    return Runs.of(np.array([len(run) for run in lists_of_pairs], np.int64), values)


def lists_of(runs):
    return [
        [tuple(value) for value in runs.values[start:stop].tolist()]
        for start, stop in zip(runs.begin, runs.begin[1:], strict=False)
    ]


@PROPERTY
@given(lists)
def test_distinct_runs_are_each_once_and_every_run_names_its_own(content):
    runs, number = runs_of(content).distinct()
    distinct = lists_of(runs)
    assert len({tuple(run) for run in distinct}) == len(distinct)
    assert [distinct[at] for at in number] == content


@PROPERTY
@given(lists, st.randoms(use_true_random=False))
def test_distinct_runs_come_in_an_order_that_depends_on_their_content_alone(content, rng):
    other = list(content)
    rng.shuffle(other)
    assert lists_of(runs_of(content).distinct()[0]) == lists_of(runs_of(other).distinct()[0])


@PROPERTY
@given(lists, st.data())
def test_taken_runs_are_those_asked_for_in_their_order(content, data):
    wanted = data.draw(st.lists(st.sampled_from(range(len(content))))) if content else []
    taken = runs_of(content).take(np.array(wanted, np.int64))
    assert lists_of(taken) == [content[at] for at in wanted]


def test_spread_counts_through_each_range_in_turn():
    assert spread(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
