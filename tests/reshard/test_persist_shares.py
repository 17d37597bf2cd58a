import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import layout_pairs

from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout, MeshLayout
from reshard.persist_shares import persist_shares
from reshard.redundancy import captures


@given(pair=layout_pairs(), replicas=st.integers(1, 3), data=st.data())
def test_every_distinct_shard_is_written_once_by_a_host_that_has_it(
    pair: tuple[Layout, Layout], replicas: int, data: st.DataObject
):
    layout, _ = pair
    captured = captures(layout, replicas)
    shares = persist_shares(layout, captured)
    assert sorted(shares) == sorted(captured)
    written = [shard for shards in shares.values() for shard in shards]
    assert sorted(written) == sorted({shard for shards in captured.values() for shard in shards})
    assert all(set(shares[host]) <= set(captured[host]) for host in captured)
    shuffled = {
        host: data.draw(st.permutations(captured[host]))
        for host in data.draw(st.permutations(list(captured)))
    }
    assert persist_shares(layout, shuffled) == shares


@given(pair=layout_pairs(), replicas=st.integers(1, 3))
def test_no_host_writes_more_than_a_fair_share_and_one_shard(pair: tuple[Layout, Layout], replicas: int):
    """List scheduling: where every host may write any shard, loads differ by one shard at most."""
    layout, _ = pair
    hosts = layout.mesh.distinct_hosts()
    shards = {shard for shards in captures(layout, replicas).values() for shard in shards}
    nbytes = {array.path: array for array in layout.arrays}
    sizes = {(path, box): nbytes[path].box_nbytes(box) for path, box in shards}
    shares = persist_shares(layout, dict.fromkeys(hosts, tuple(shards)))
    loads = [sum(sizes[shard] for shard in shares[host]) for host in hosts]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_a_shard_of_an_unknown_array_is_refused():
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(1,), hosts=(HostId(0),))
    with pytest.raises(UsageError, match="'x', which the layout does not have"):
        persist_shares(Layout(mesh=mesh, arrays=()), {HostId(0): [("x", ())]})
