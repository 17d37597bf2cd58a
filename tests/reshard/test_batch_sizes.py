"""How many samples a step takes, and that the stream has neither gap nor repetition whatever is lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY

from reshard.batch_sizes import (
    GlobalBatch,
    NewSteps,
    SliceBatch,
    begin_world,
    choose_batch_size,
    world_of,
    worlds_since,
)
from reshard.errors import UsageError

SLICE_BATCH = 4


def choose(**changes):
    arguments = {"global_batch": None, "slice_batch": None, "lr_rule": None, "full_slices": 3}
    return choose_batch_size(**(arguments | {"is_weighted": True} | changes))


def slice_batch(rule, full_slices=4):
    return SliceBatch(rows_per_slice=SLICE_BATCH, full_slices=full_slices, lr_rule=rule)


# ---- the two sizes -----------------------------------------------------------------------------------------


def test_global_batch_and_learning_rate_stay_whatever_is_alive():
    size = choose(global_batch=48)
    assert size == GlobalBatch(num_rows=48)
    assert {size.global_batch(num_slices) for num_slices in range(1, 9)} == {48}
    assert size.lr_scale(48) == 1.0


@pytest.mark.parametrize(
    ("rule", "scales"),
    [("linear", [0.25, 0.5, 1.0]), ("sqrt", [0.5, math.sqrt(0.5), 1.0]), ("none", [1.0, 1.0, 1.0])],
)
def test_slice_batch_scales_the_learning_rate_by_its_rule(rule, scales):
    size = slice_batch(rule)
    batches = [size.global_batch(num_slices) for num_slices in (1, 2, 4)]
    assert batches == [4, 8, 16]
    assert [size.lr_scale(batch) for batch in batches] == scales


def test_slice_batch_scale_belongs_to_the_samples_of_the_step_not_to_who_is_alive():
    size = choose(slice_batch=4, lr_rule="linear")
    replayed_on_two_slices = size.global_batch(3)
    assert size.lr_scale(replayed_on_two_slices) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "either global_batch or slice_batch"),
        ({"global_batch": 48, "slice_batch": 16}, "either global_batch or slice_batch"),
        ({"global_batch": 48, "lr_rule": "linear"}, "lr_rule='linear' has no meaning"),
        ({"slice_batch": 16}, "nothing says how the learning rate follows"),
        ({"slice_batch": 16, "lr_rule": "linear", "is_weighted": False}, "its rows need not divide"),
        ({"slice_batch": 16, "lr_rule": "cubic"}, "there is no learning-rate rule 'cubic'"),
        ({"slice_batch": 0, "lr_rule": "none"}, "at least 1 sample"),
        ({"global_batch": 0}, "at least 1 sample"),
    ],
)
def test_batch_size_refuses_what_does_not_fit_together(changes, message):
    with pytest.raises(UsageError, match=message):
        choose(**changes)


# ---- who made a step first ---------------------------------------------------------------------------------


def begin(earlier, generation, num_slices, newest, restored):
    return begin_world(
        earlier, restored_step=restored, newest_committed=newest, generation=generation, num_slices=num_slices
    )


def test_step_keeps_the_size_of_the_world_that_committed_it_first():
    worlds = begin((), 1, 3, newest=-1, restored=-1)
    worlds = begin(worlds, 2, 2, newest=9, restored=7)
    worlds = begin(worlds, 3, 3, newest=9, restored=7)  # world 2 committed nothing new
    worlds = begin(worlds, 4, 1, newest=12, restored=9)
    assert worlds == (
        NewSteps(first_step=0, generation=1, num_slices=3),
        NewSteps(first_step=10, generation=3, num_slices=3),
        NewSteps(first_step=13, generation=4, num_slices=1),
    )
    assert [world_of(worlds, step).generation for step in (0, 9, 10, 12, 13, 99)] == [1, 1, 3, 3, 4, 4]
    assert worlds_since(worlds, 10) == worlds[1:]
    assert worlds_since(worlds, 12) == worlds[1:]
    assert worlds_since(worlds, 13) == worlds[2:]


def test_step_of_an_earlier_job_is_as_large_as_that_of_the_first_world_that_makes_it_here():
    worlds = begin((), 1, 3, newest=100, restored=100)
    assert worlds[0].first_step == 101
    worlds = begin(worlds, 2, 2, newest=100, restored=60)  # the snapshot of step 100 turned out to be bad
    worlds = begin(worlds, 3, 1, newest=100, restored=60)
    # Which of the steps up to 100 world 2 made is not known: all of them stay as large as they were there.
    assert [(world.first_step, world.num_slices) for world in worlds] == [(61, 2), (101, 1)]
    worlds = begin(worlds, 4, 2, newest=110, restored=40)
    assert world_of(worlds, 50) == worlds[0]
    assert worlds_since(worlds, 41) == worlds


# ---- a job that shrinks and grows --------------------------------------------------------------------------

worlds_of_a_job = st.lists(
    st.fixed_dictionaries(
        {"num_slices": st.integers(1, 6), "roll_back": st.integers(0, 9), "num_steps": st.integers(0, 9)}
    ),
    min_size=1,
    max_size=50,
)


@PROPERTY
@given(worlds_of_a_job)
def test_stream_has_no_gap_and_no_repetition_over_any_sequence_of_shrinks_and_grows(job):
    """Each world restores a step, runs again what was committed beyond it, and commits more, or fewer."""
    size = slice_batch("linear", full_slices=6)
    state: list[
        tuple[int, int]
    ] = []  # of each step that is in the state: its place in the stream, its samples
    committed: dict[int, tuple[int, int]] = {}
    worlds: tuple[NewSteps, ...] = ()
    for generation, world in enumerate(job, 1):
        state = state[: len(state) - min(world["roll_back"], len(state))]
        newest, restored = len(committed) - 1, len(state) - 1
        worlds = begin(worlds, generation, world["num_slices"], newest, restored)
        told = worlds_since(worlds, restored + 1)
        for step in range(len(state), len(state) + world["num_steps"]):
            position = sum(state[-1]) if state else 0
            batch = position, size.global_batch(world_of(told, step).num_slices)
            is_new = step > newest
            assert not is_new or batch[1] == SLICE_BATCH * world["num_slices"]
            assert committed.setdefault(step, batch) == batch, f"step {step} used other samples before"
            state.append(batch)
    places = [place for start, count in state for place in range(start, start + count)]
    assert places == list(range(len(places)))
