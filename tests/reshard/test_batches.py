from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY

from reshard.batches import BatchPlan, plan_batch, sample_ids
from reshard.errors import UsageError

bounds = st.none() | st.integers(1, 60)
plans = st.builds(plan_batch, st.integers(1, 200), st.integers(1, 40), bounds)
sizes = st.integers(1, 30)


@PROPERTY
@given(plans)
def test_batch_plan_gives_every_global_row_weight_one_exactly_once(plan):
    rows, weights = plan.rows(), plan.weights()
    assert rows.shape == weights.shape == (plan.num_micro_batches, plan.num_shards, plan.rows_per_shard)
    np.testing.assert_array_equal(np.sort(rows[weights == 1]), np.arange(plan.global_batch))
    assert set(np.unique(weights)) <= {0.0, 1.0}
    assert (weights == 0).sum() == plan.num_padding_rows


@PROPERTY
@given(plans)
def test_batch_plan_keeps_rows_in_global_order_whatever_shards_and_micro_batches_there_are(plan):
    by_shard, weights = plan.rows().swapaxes(0, 1), plan.weights().swapaxes(0, 1)
    np.testing.assert_array_equal(by_shard[weights == 1], np.arange(plan.global_batch))


@PROPERTY
@given(plans)
def test_batch_plan_pads_each_part_by_at_most_one_row_with_valid_data(plan):
    rows, weights = plan.rows(), plan.weights()
    assert (weights == 0).sum(axis=-1).max() <= 1
    assert 0 <= rows.min() <= rows.max() < plan.global_batch


@PROPERTY
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 60))
def test_batch_plan_has_the_fewest_micro_batches_that_keep_the_bound(global_batch, num_shards, most):
    plan = plan_batch(global_batch, num_shards, most)
    assert plan.rows_per_shard <= most
    assert (plan.num_micro_batches - 1) * num_shards * most < global_batch


@PROPERTY
@given(plans, st.integers(0, 2**32))
def test_batch_plan_weighted_mean_is_the_mean_of_the_global_batch_in_exact_arithmetic(plan, seed):
    losses = np.random.default_rng(seed).integers(-(10**6), 10**6, plan.global_batch)
    weighted = int((plan.weights().astype(np.int64) * losses[plan.rows()]).sum())
    assert Fraction(weighted, plan.global_batch) == Fraction(int(losses.sum()), plan.global_batch)


@PROPERTY
@given(plans, st.data())
def test_batch_plan_holds_fewer_rows_in_the_same_shape(plan, data):
    other = plan.holding(data.draw(st.integers(1, plan.num_places)))
    rows, weights = other.rows(), other.weights()
    assert rows.shape == plan.rows().shape
    np.testing.assert_array_equal(np.sort(rows[weights == 1]), np.arange(other.global_batch))


def test_batch_plan_needs_more_micro_batches_on_fewer_shards_not_more_memory():
    plans = [plan_batch(48, shards, 16) for shards in (3, 2, 1)]
    assert [(plan.num_micro_batches, plan.rows_per_shard) for plan in plans] == [(1, 16), (2, 12), (3, 16)]
    assert [plan.num_padding_rows for plan in plans] == [0, 0, 0]


def test_batch_plan_without_a_bound_is_one_micro_batch_padded_where_it_does_not_divide():
    plan = plan_batch(48, 5)
    assert (plan.num_micro_batches, plan.rows_per_shard, plan.num_padding_rows) == (1, 10, 2)


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (-4, 2), (4, 2, 0)])
def test_batch_plan_refuses_nothing_to_split(arguments):
    with pytest.raises(UsageError, match="cannot split a batch"):
        plan_batch(*arguments)


def test_batch_plan_refuses_rows_that_do_not_fit():
    with pytest.raises(UsageError, match="a batch of 13 rows does not fit 3 shards of 1 × 4 rows"):
        plan_batch(12, 3).holding(13)
    with pytest.raises(UsageError, match="in 0 micro-batches of 4 rows each"):
        BatchPlan(global_batch=12, num_shards=3, num_micro_batches=0, rows_per_shard=4)


@PROPERTY
@given(st.integers(0, 9), sizes, st.integers(0, 80), st.lists(st.integers(0, 25), min_size=1, max_size=8))
def test_sample_stream_is_the_same_however_it_is_cut(seed, dataset_size, position, counts):
    ids, epochs = sample_ids(seed, position, sum(counts), dataset_size)
    parts = [
        sample_ids(seed, position + sum(counts[:index]), count, dataset_size)
        for index, count in enumerate(counts)
    ]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), ids)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), epochs)


@PROPERTY
@given(st.integers(0, 2**70), sizes, st.integers(0, 5))
def test_sample_stream_has_every_sample_once_in_each_epoch(seed, dataset_size, epoch):
    ids, epochs = sample_ids(seed, epoch * dataset_size, dataset_size, dataset_size)
    np.testing.assert_array_equal(np.sort(ids), np.arange(dataset_size))
    assert (epochs == epoch).all()


def test_sample_stream_differs_between_epochs_and_between_seeds():
    ids, _ = sample_ids(0, 0, 200, 100)
    other, _ = sample_ids(1, 0, 100, 100)
    assert (ids[:100] != ids[100:]).any()
    assert (ids[:100] != other).any()


def test_sample_stream_never_changes_between_releases():
    ids, epochs = sample_ids(7, 6, 8, 8)
    assert ids.tolist() == [6, 1, 2, 0, 3, 5, 6, 4]
    assert epochs.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


def test_sample_ids_stay_right_when_a_batch_spans_many_epochs():
    ids, epochs = sample_ids(3, 0, 10, 2)
    assert sorted(ids[:2]) == sorted(ids[8:]) == [0, 1]
    assert epochs.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_sample_ids_are_the_callers_own_to_change():
    first, _ = sample_ids(5, 0, 10, 10)
    expected = first.copy()
    first[:] = -1
    np.testing.assert_array_equal(sample_ids(5, 0, 10, 10)[0], expected)


@pytest.mark.parametrize("arguments", [(-1, 0, 1, 1), (0, -1, 1, 1), (0, 0, -1, 1), (0, 0, 1, 0)])
def test_sample_ids_refuse_impossible_arguments(arguments):
    with pytest.raises(UsageError, match="no samples at position"):
        sample_ids(*arguments)
