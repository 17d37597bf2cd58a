import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY

from reshard.balance import even_shares
from reshard.runs import Runs


def pools_of(pools):
    hosts = np.array([host for pool in pools for host in pool], np.int64).reshape(-1, 1)
    return Runs.of(np.array([len(pool) for pool in pools], np.int64), hosts)


def loads(pools, pool_bytes, num_hosts):
    shares = even_shares(pools_of(pools), np.array(pool_bytes, np.int64), num_hosts)
    return np.bincount(pools_of(pools).values[:, 0], weights=shares, minlength=num_hosts)


some_pools = st.lists(
    st.tuples(st.sets(st.integers(0, 5), min_size=1).map(sorted), st.integers(0, 10_000)), max_size=8
)


def least_maximum(pools):
    """The model (max-flow min-cut): any set of hosts sends at least the pools that lie wholly within it."""
    subsets = [{host for host in range(6) if bits >> host & 1} for bits in range(1, 64)]
    return max(sum(n for hosts, n in pools if set(hosts) <= within) / len(within) for within in subsets)


@PROPERTY
@given(some_pools)
def test_shares_add_up_to_each_pool_and_are_not_negative(pools):
    shares = even_shares(pools_of([p for p, _ in pools]), np.array([n for _, n in pools], np.int64), 6)
    assert (shares >= 0).all()
    begin = 0
    for hosts, nbytes in pools:
        assert shares[begin : begin + len(hosts)].sum() == pytest.approx(nbytes)
        begin += len(hosts)


@PROPERTY
@given(some_pools)
def test_largest_load_is_within_a_tenth_of_the_least_possible(pools):
    largest = loads([p for p, _ in pools], [n for _, n in pools], 6).max()
    assert largest <= 1.1 * least_maximum(pools) + 1e-6


def test_what_has_a_choice_makes_room_for_what_has_none():
    assert loads([[0], [0, 1], [1, 2]], [60, 30, 60], 3)[0] == pytest.approx(60, rel=0.01)


def test_uniform_pools_come_out_even():
    ring = [[host, (host + 1) % 32] for host in range(32)]
    assert loads(ring, [1000] * 32, 32) == pytest.approx([1000] * 32)


def test_pools_of_nothing_are_shared_as_nothing():
    assert loads([[0, 1], [2]], [0, 0], 3) == pytest.approx([0, 0, 0])
    assert loads([], [], 2) == pytest.approx([0, 0])


def test_lost_neighbour_in_a_ring_of_copies_is_evened_out_over_all():
    ring = [[host, host + 1] for host in range(30)] + [[30], [0]]  # each box on two slices, the last one lost
    assert loads(ring, [1000] * 32, 31).max() <= 1.05 * 32_000 / 31
