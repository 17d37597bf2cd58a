from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.boxes import full_box, is_covered, volume
from reshard.errors import UsageError
from reshard.holdings import TIERS
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.redundancy import (
    buddies,
    buddy_stock,
    capture_stock,
    captures,
    host_buddies,
    host_captures,
    needs_buddies,
)

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
        num_copies = min(replicas, len({host.slice_index for host in owners[shard]}))
        assert set(hosts) <= owners[shard]
        assert len(hosts) == len({host.slice_index for host in hosts})
        # Of an empty box, which several parts of a padded array may be, one part's copies are enough.
        assert len(hosts) == num_copies if volume(shard[1]) else 1 <= len(hosts) <= num_copies


@PROPERTY
@given(layouts)
def test_captures_take_all_that_a_slice_holds_when_replicas_reach_the_slices(layout):
    captured = captures(layout, len({host.slice_index for host in layout.mesh.hosts}))
    for slice_index in {host.slice_index for host in layout.mesh.hosts}:
        taken = [
            shard
            for host, shards in captured.items()
            for shard in shards
            if host.slice_index == slice_index and volume(shard[1])
        ]
        held = [
            shard
            for shard, hosts in owners_of(layout).items()
            if any(host.slice_index == slice_index for host in hosts) and volume(shard[1])
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
    kept = defaultdict(list)
    for host, shards in captures(layout, replicas=2).items():
        for path, box in shards:
            if host.slice_index != lost:
                kept[path].append(box)
    held_alone = {
        path
        for (path, box), hosts in owners_of(layout).items()
        if {host.slice_index for host in hosts} == {lost} and volume(box)
    }
    lacking = {
        array.path for array in layout.arrays if not is_covered(full_box(array.shape), kept[array.path])
    }
    assert lacking == held_alone


@PROPERTY
@given(layouts, replica_counts)
def test_one_host_and_the_columns_have_what_all_have(layout, replicas):
    captured, kept = captures(layout, replicas), buddies(layout, replicas)
    for host in layout.mesh.distinct_hosts():
        assert host_captures(layout, host, replicas) == captured[host]
        assert host_buddies(layout, host, replicas) == kept[host]
    with_elements = {host: {s for s in shards if volume(s[1])} for host, shards in captured.items()}
    assert shards_of(capture_stock(layout, replicas), "shm") == with_elements
    copies = {host: {(c.path, c.box) for c in copies if volume(c.box)} for host, copies in kept.items()}
    assert shards_of(buddy_stock(layout, replicas), "peer") == copies
    assert needs_buddies(layout, replicas) >= any(kept.values())


def shards_of(stock, tier):
    found = {host: set() for host in stock.hosts}
    for group in stock.groups:
        assert {TIERS[index] for index in group.tier.tolist()} == {tier}
        boxes = [tuple(map(tuple, box)) for box in group.boxes.tolist()]
        for host, box in zip(group.host.tolist(), group.box.tolist(), strict=True):
            if volume(boxes[box]):
                found[stock.hosts[host]] |= {(path, boxes[box]) for path in group.paths}
    return found


def test_one_host_must_be_in_the_mesh():
    layout = data_parallel(2, 1, [5])
    for of_host in (host_captures, host_buddies):
        with pytest.raises(UsageError, match="s2h0 is not a host of the mesh"):
            of_host(layout, HostId(2))


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
def test_captures_differ_by_at_most_two_boxes_in_bytes_when_state_is_replicated(num_slices, sizes, replicas):
    captured = captures(data_parallel(num_slices, 1, sizes), replicas)
    loads = [sum(box[0][1] for _, box in shards) for shards in captured.values()]
    assert sum(loads) == min(replicas, num_slices) * sum(sizes)
    assert max(loads) - min(loads) <= 2 * max(sizes)


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


def test_captures_fill_up_the_slices_that_hold_least_of_what_has_no_choice():
    """Slice 0 holds two thirds of the split arrays alone; it captures less of the replicated ones."""
    hosts = (HostId(0), HostId(0), HostId(0), HostId(0), HostId(1), HostId(2))
    specs = {"split": (("x",),), "whole": ()}
    layout = Layout(
        mesh=MeshLayout(axis_names=("x",), axis_sizes=(6,), hosts=hosts),
        arrays=tuple(
            ArrayLayout(path=f"{name}{i:02}", shape=(60,), dtype="uint8", itemsize=1, spec=spec)
            for name, spec in specs.items()
            for i in range(10)
        ),
    )
    captured = captures(layout, 2)
    loads = {host: sum(box[0][1] - box[0][0] for _, box in shards) for host, shards in captured.items()}
    assert sum(loads.values()) == 600 + 1200
    assert max(loads.values()) - min(loads.values()) <= 60


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


def keepers_of(captured, kept):
    keepers = takers_of(captured)
    for host, copies in kept.items():
        for copy in copies:
            keepers.setdefault((copy.path, copy.box), []).append(host)
    return keepers


def nbytes_by_host(layout, kept):
    arrays = {array.path: array for array in layout.arrays}
    return {host: sum(arrays[c.path].box_nbytes(c.box) for c in copies) for host, copies in kept.items()}


@PROPERTY
@given(layouts, replica_counts)
def test_buddies_complete_the_copies_of_each_box_on_different_slices(layout, replicas):
    captured = captures(layout, replicas)
    keepers = keepers_of(captured, buddies(layout, replicas))
    num_slices = len({host.slice_index for host in layout.mesh.hosts})
    assert keepers.keys() == owners_of(layout).keys()
    for hosts in keepers.values():
        assert len(hosts) == len({host.slice_index for host in hosts}) == min(replicas, num_slices)


@PROPERTY
@given(layouts, replica_counts)
def test_buddies_are_on_slices_without_the_box_and_pull_from_all_that_capture_it(layout, replicas):
    owners, captured = owners_of(layout), captures(layout, replicas)
    takers = takers_of(captured)
    kept = buddies(layout, replicas)
    assert list(kept) == list(captured)
    for host, copies in kept.items():
        assert list(copies) == sorted(copies, key=lambda copy: (copy.path, copy.box))
        for copy in copies:
            shard = (copy.path, copy.box)
            if volume(copy.box):  # an empty box may be several parts of a padded array
                assert host.slice_index not in {owner.slice_index for owner in owners[shard]}
            assert sorted(copy.sources) == sorted(takers[shard])


@PROPERTY
@given(layouts, replica_counts, st.data())
def test_buddies_keep_every_box_through_the_loss_of_all_but_one_replica(layout, replicas, data):
    slices = sorted({host.slice_index for host in layout.mesh.hosts})
    num_lost = min(replicas, len(slices)) - 1
    lost = set(data.draw(st.permutations(slices))[:num_lost])
    captured = captures(layout, replicas)
    for hosts in keepers_of(captured, buddies(layout, replicas)).values():
        assert any(host.slice_index not in lost for host in hosts)


@PROPERTY
@given(layouts, replica_counts, st.randoms(use_true_random=False))
def test_buddies_do_not_depend_on_the_order_of_arrays(layout, replicas, rng):
    arrays = list(layout.arrays)
    rng.shuffle(arrays)
    shuffled = Layout(mesh=layout.mesh, arrays=tuple(arrays))
    assert buddies(shuffled, replicas) == buddies(layout, replicas)


def sharded_over_slices(num_slices, hosts_per_slice, lengths, copies_in_slice=1):
    """Every array split over all hosts; with `copies_in_slice`, that many hosts of a slice share a box."""
    hosts = tuple(HostId(s, h) for s in range(num_slices) for h in range(hosts_per_slice))
    num_parts = len(hosts) // copies_in_slice
    return Layout(
        mesh=MeshLayout(axis_names=("fsdp", "copy"), axis_sizes=(num_parts, copies_in_slice), hosts=hosts),
        arrays=tuple(
            ArrayLayout(
                path=f"w{index:03}",
                shape=(num_parts * length,),
                dtype="uint8",
                itemsize=1,
                spec=(("fsdp",),),
            )
            for index, length in enumerate(lengths)
        ),
    )


@PROPERTY
@given(
    st.integers(2, 5),
    st.integers(1, 3),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.integers(2, 4),
)
def test_buddies_of_evenly_split_state_are_the_next_slices_and_get_equal_bytes(
    num_slices, hosts_per_slice, lengths, replicas
):
    layout = sharded_over_slices(num_slices, hosts_per_slice, lengths)
    kept = buddies(layout, replicas)
    num_copies = min(replicas, num_slices) - 1
    assert set(nbytes_by_host(layout, kept).values()) == {num_copies * sum(lengths)}
    for host, copies in kept.items():
        before = {
            HostId((host.slice_index - back) % num_slices, host.host_index)
            for back in range(1, num_copies + 1)
        }
        assert {source for copy in copies for source in copy.sources} == before


@PROPERTY
@given(st.integers(2, 5), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_buddies_stay_within_one_box_of_the_mean_when_hosts_of_a_slice_share_boxes(num_slices, lengths):
    layout = sharded_over_slices(num_slices, 4, lengths, copies_in_slice=2)
    loads = nbytes_by_host(layout, buddies(layout))
    assert max(loads.values()) < 1.25 * sum(loads.values()) / len(loads) + max(lengths) + 1


@PROPERTY
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 4))
def test_buddies_divide_among_all_slices_what_pairs_of_slices_hold(lengths, num_pairs):
    hosts = tuple(HostId(index) for index in range(2 * num_pairs))
    layout = Layout(
        mesh=MeshLayout(axis_names=("split", "copy"), axis_sizes=(num_pairs, 2), hosts=hosts),
        arrays=tuple(
            ArrayLayout(
                path=f"w{index:03}",
                shape=(num_pairs * length,),
                dtype="uint8",
                itemsize=1,
                spec=(("split",),),
            )
            for index, length in enumerate(lengths)
        ),
    )
    kept = buddies(layout, 3)
    loads = nbytes_by_host(layout, kept)
    assert sum(loads.values()) == num_pairs * sum(lengths)
    assert max(loads.values()) < 1.25 * sum(loads.values()) / len(loads) + max(lengths) + 1
    asked = dict.fromkeys(hosts, 0)
    for copies in kept.values():
        for copy in copies:
            asked[copy.sources[0]] += copy.box[0][1] - copy.box[0][0]
    for first, second in zip(hosts[::2], hosts[1::2], strict=True):
        assert abs(asked[first] - asked[second]) <= max(lengths)


def test_buddies_even_out_what_one_slice_holds_alone_over_the_others():
    hosts = (HostId(0), HostId(0), HostId(0), HostId(1), HostId(2), HostId(3))
    layout = Layout(
        mesh=MeshLayout(axis_names=("x",), axis_sizes=(6,), hosts=hosts),
        arrays=tuple(
            ArrayLayout(path=f"w{i:02}", shape=(60,), dtype="uint8", itemsize=1, spec=(("x",),))
            for i in range(10)
        ),
    )
    loads = nbytes_by_host(layout, buddies(layout))
    assert sum(loads.values()) == 600
    assert max(loads.values()) <= 600 / 3 + 10  # slice 0 holds half of all, and may keep no copy of it


def test_buddies_and_captures_together_take_fewer_bytes_a_host_as_slices_grow():
    bytes_per_host = []
    for num_slices in (2, 3, 4, 6, 12):
        layout = sharded_over_slices(num_slices, 1, [120 // num_slices] * 10)
        captured = captures(layout)
        loads = nbytes_by_host(layout, buddies(layout))
        taken = {sum(box[0][1] - box[0][0] for _, box in shards) for shards in captured.values()}
        assert len(set(loads.values())) == len(taken) == 1
        bytes_per_host.append(loads[HostId(0)] + taken.pop())
    assert bytes_per_host == [1200, 800, 600, 400, 200]


def test_buddies_are_needless_where_slices_replicate():
    layout = data_parallel(3, 2, [5, 7])
    assert buddies(layout) == dict.fromkeys(layout.mesh.distinct_hosts(), ())


def test_buddies_place_nothing_when_there_is_one_slice():
    layout = sharded_over_slices(1, 2, [5])
    assert set(buddies(layout).values()) == {()}


def test_buddies_refuse_less_than_one_replica():
    with pytest.raises(UsageError, match="replicas must be at least 1, got 0"):
        buddies(sharded_over_slices(2, 2, [5]), replicas=0)


def test_no_buddies_are_needed_for_empty_parts_that_repeat_another():
    """Part 0 has the only element; part 2 is as empty as part 1, and on one slice only."""
    a, b = HostId(0), HostId(1)
    mesh = MeshLayout(axis_names=("data", "model"), axis_sizes=(3, 2), hosts=(a, b, a, b, a, a))
    array = ArrayLayout(path="w", shape=(1,), dtype="uint8", itemsize=1, spec=(("data",),), padded=True)
    layout = Layout(mesh=mesh, arrays=(array,))
    assert not any(buddies(layout).values())
    assert not needs_buddies(layout)
