import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.boxes import volume
from reshard.coverage import uncovered_at
from reshard.errors import UsageError
from reshard.holdings import captured_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.redundancy import captures

layouts = layout_pairs().map(lambda pair: pair[0])
replica_counts = st.integers(1, 4)


def owners_of(layout):
    owners = {}
    for array in layout.arrays:
        for host, box in zip(layout.mesh.hosts, layout.boxes(array), strict=True):
            owners.setdefault((array.path, box), set()).add(host)
    return owners


def takers_of(captured):
    takers = {}
    for host, shards in captured.items():
        for shard in shards:
            takers.setdefault(shard, []).append(host)
    return takers


@PROPERTY
@given(layouts, replica_counts)
def test_captures_put_each_box_on_exactly_the_replicas_that_slices_allow(layout, replicas):
    owners, takers = owners_of(layout), takers_of(captures(layout, replicas))
    assert takers.keys() == owners.keys()
    for shard, hosts in takers.items():
        holding_slices = {host.slice_index for host in owners[shard]}
        assert set(hosts) <= owners[shard]
        assert len(hosts) == len({host.slice_index for host in hosts}) == min(replicas, len(holding_slices))


@PROPERTY
@given(layouts)
def test_captures_take_all_that_a_slice_holds_when_replicas_reach_the_slices(layout):
    captured = captures(layout, len({host.slice_index for host in layout.mesh.hosts}))
    for slice_index in {host.slice_index for host in layout.mesh.hosts}:
        taken = [
            shard for host, shards in captured.items() if host.slice_index == slice_index for shard in shards
        ]
        held = [
            s for s, hosts in owners_of(layout).items() if any(h.slice_index == slice_index for h in hosts)
        ]
        assert sorted(taken) == sorted(held)


@PROPERTY
@given(layouts, replica_counts, st.randoms(use_true_random=False))
def test_captures_do_not_depend_on_the_order_of_arrays(layout, replicas, rng):
    arrays = list(layout.arrays)
    rng.shuffle(arrays)
    shuffled = Layout(mesh=layout.mesh, arrays=tuple(arrays))
    assert captures(shuffled, replicas) == captures(layout, replicas)


@PROPERTY
@given(layouts, st.data())
def test_captures_lose_state_with_a_slice_exactly_when_it_held_some_alone(layout, data):
    lost = data.draw(st.sampled_from(sorted({host.slice_index for host in layout.mesh.hosts})))
    holdings = captured_holdings(captures(layout, replicas=2), step=1)
    kept = [holding for holding in holdings if holding.host.slice_index != lost]
    held_alone = {
        path
        for (path, box), hosts in owners_of(layout).items()
        if {host.slice_index for host in hosts} == {lost} and volume(box)
    }
    assert set(uncovered_at(layout.arrays, kept, step=1)) == held_alone


def data_parallel(num_slices, hosts_per_slice, nbytes_list):
    hosts = tuple(HostId(s, h) for s in range(num_slices) for h in range(hosts_per_slice))
    return Layout(
        mesh=MeshLayout(axis_names=("data",), axis_sizes=(len(hosts),), hosts=hosts),
        arrays=tuple(
            ArrayLayout(path=f"w{index:03}", shape=(nbytes,), dtype="uint8", itemsize=1)
            for index, nbytes in enumerate(nbytes_list)
        ),
        elastic_axis="data",
    )


@PROPERTY
@given(st.integers(2, 6), st.lists(st.integers(0, 50), min_size=1, max_size=30), replica_counts)
def test_captures_differ_by_at_most_one_box_in_bytes_when_state_is_replicated(num_slices, sizes, replicas):
    captured = captures(data_parallel(num_slices, 1, sizes), replicas)
    loads = [sum(box[0][1] for _, box in shards) for shards in captured.values()]
    assert sum(loads) == min(replicas, num_slices) * sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


def test_captures_share_the_work_of_a_slice_among_its_hosts():
    captured = captures(data_parallel(2, 4, [10] * 24), replicas=2)
    assert {sum(box[0][1] for _, box in shards) for shards in captured.values()} == {60}


def test_captures_share_equal_boxes_evenly_and_the_share_falls_as_slices_grow():
    bytes_per_host = []
    for num_slices in (2, 3, 4, 8):
        captured = captures(data_parallel(num_slices, 1, [10] * 24), replicas=2)
        loads = {sum(box[0][1] for _, box in shards) for shards in captured.values()}
        assert len(loads) == 1
        bytes_per_host.append(loads.pop())
    assert bytes_per_host == [240, 160, 120, 60]


def test_captures_even_out_boxes_with_a_choice_around_those_without():
    hosts = (HostId(0), HostId(1))
    layout = Layout(
        mesh=MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=hosts),
        arrays=(
            ArrayLayout(path="big", shape=(60,), dtype="uint8", itemsize=1),
            ArrayLayout(path="split", shape=(80,), dtype="uint8", itemsize=1, spec=(("data",),)),
            ArrayLayout(path="tiny", shape=(60,), dtype="uint8", itemsize=1),
        ),
    )
    captured = captures(layout, replicas=1)
    assert {str(host): [path for path, _ in shards] for host, shards in captured.items()} == {
        "s0h0": ["big", "split"],
        "s1h0": ["split", "tiny"],
    }


def test_captures_give_every_host_an_entry_even_an_empty_one():
    captured = captures(data_parallel(3, 1, [5]), replicas=1)
    assert [len(shards) for shards in captured.values()] == [1, 0, 0]


def test_captures_refuse_less_than_one_replica():
    with pytest.raises(UsageError, match="replicas must be at least 1, got 0"):
        captures(data_parallel(2, 1, [5]), replicas=0)
