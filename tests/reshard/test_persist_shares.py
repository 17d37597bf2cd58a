import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.persist_shares import host_persist_shares, persist_shares
from reshard.redundancy import captures

layouts = layout_pairs().map(lambda pair: pair[0])


@PROPERTY
@given(layout=layouts, replicas=st.integers(1, 3), rng=st.randoms(use_true_random=False))
def test_every_distinct_shard_is_written_once_by_a_host_that_has_it(layout: Layout, replicas: int, rng):
    captured = captures(layout, replicas)
    shares = persist_shares(layout, replicas)
    assert list(shares) == list(captured)
    written = [shard for shards in shares.values() for shard in shards]
    assert sorted(written) == sorted({shard for shards in captured.values() for shard in shards})
    for host, shards in shares.items():
        assert set(shards) <= set(captured[host])
        assert host_persist_shares(layout, host, replicas) == shards == tuple(sorted(shards))
    arrays = list(layout.arrays)
    rng.shuffle(arrays)
    assert persist_shares(Layout(mesh=layout.mesh, arrays=tuple(arrays)), replicas) == shares


def replicated(num_slices: int, sizes: list[int]) -> Layout:
    hosts = tuple(HostId(index) for index in range(num_slices))
    return Layout(
        mesh=MeshLayout(axis_names=("data",), axis_sizes=(num_slices,), hosts=hosts),
        arrays=tuple(
            ArrayLayout(path=f"w{index:03}", shape=(size,), dtype="uint8", itemsize=1)
            for index, size in enumerate(sizes)
        ),
    )


@PROPERTY
@given(st.integers(2, 6), st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 4))
def test_hosts_that_hold_the_same_write_bytes_within_two_boxes_of_each_other(num_slices, sizes, replicas):
    shares = persist_shares(replicated(num_slices, sizes), replicas)
    loads = [sum(box[0][1] for _, box in shards) for shards in shares.values()]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= 2 * max(sizes)


def test_equal_shards_are_written_by_all_hosts_alike():
    for replicas in (1, 2, 3):
        shares = persist_shares(replicated(4, [10] * 24), replicas)
        assert {len(shards) for shards in shares.values()} == {6}


def test_one_host_must_be_in_the_mesh():
    with pytest.raises(UsageError, match="s9h0 is not a host of the mesh"):
        host_persist_shares(replicated(2, [1]), HostId(9))
