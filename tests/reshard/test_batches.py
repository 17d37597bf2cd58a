import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY

from reshard.batches import sample_ids, split_batch
from reshard.errors import UsageError

splits = st.builds(split_batch, st.integers(1, 200), st.integers(1, 40))
sizes = st.integers(1, 30)


@PROPERTY
@given(splits)
def test_batch_split_gives_every_global_row_weight_one_exactly_once(split):
    rows, weights = split.rows(), split.weights()
    assert rows.shape == weights.shape == (split.num_shards, split.rows_per_shard)
    np.testing.assert_array_equal(rows[weights == 1], np.arange(split.global_batch))
    assert set(np.unique(weights)) <= {0.0, 1.0}
    assert (weights == 0).sum() == split.num_padding_rows


@PROPERTY
@given(splits)
def test_batch_split_pads_each_shard_by_at_most_one_row_with_valid_data(split):
    rows, weights = split.rows(), split.weights()
    assert (weights == 0).sum(axis=1).max() <= 1
    assert 0 <= rows.min() <= rows.max() < split.global_batch


@PROPERTY
@given(splits)
def test_batch_split_shard_ranges_agree_with_rows_and_weights(split):
    for index in range(split.num_shards):
        start, stop = split.shard_range(index)
        real = split.rows()[index][split.weights()[index] == 1]
        np.testing.assert_array_equal(real, np.arange(start, stop))


def test_batch_split_weighted_mean_equals_the_mean_of_the_global_batch_when_uneven():
    split = split_batch(48, 5)
    loss = np.linspace(0.0, 1.0, 48)
    weighted = (loss[split.rows()] * split.weights()).sum() / split.weights().sum()
    assert weighted == pytest.approx(loss.mean())
    assert (split.rows_per_shard, split.num_padding_rows) == (10, 2)


def test_batch_split_needs_no_padding_when_it_divides():
    split = split_batch(48, 3)
    assert (split.rows_per_shard, split.num_padding_rows) == (16, 0)
    assert split.weights().all()


@pytest.mark.parametrize(("global_batch", "num_shards"), [(0, 1), (1, 0), (-4, 2)])
def test_batch_split_refuses_nothing_to_split(global_batch, num_shards):
    with pytest.raises(UsageError, match="cannot split a batch"):
        split_batch(global_batch, num_shards)


@pytest.mark.parametrize("shard_index", [-1, 3])
def test_batch_split_refuses_a_shard_it_does_not_have(shard_index):
    with pytest.raises(UsageError, match="is not one of 3"):
        split_batch(48, 3).shard_range(shard_index)


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
