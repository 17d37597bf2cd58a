from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, losses, mask_of, survivable_losses

from reshard.boxes import intersect
from reshard.errors import MissingShardError, UsageError
from reshard.holdings import TIERS, Holding, layout_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.links import Links
from reshard.planner import make_plan


def brute_force_bytes(layout, holdings):
    """The bytes hosts need and do not hold, and those they do, counted element by element."""
    lacking_bytes = local_bytes = 0
    for array in layout.arrays:
        for host in set(layout.mesh.hosts):
            positions = zip(layout.mesh.hosts, layout.boxes(array), strict=True)
            needed = mask_of(array.shape, [box for owner, box in positions if owner == host])
            own = mask_of(array.shape, [h.box for h in holdings if (h.host, h.path) == (host, array.path)])
            lacking_bytes += int((needed & ~own).sum()) * array.itemsize
            local_bytes += int((needed & own).sum()) * array.itemsize
    return lacking_bytes, local_bytes


def covered(layout, holdings):
    return all(
        mask_of(array.shape, [h.box for h in holdings if h.path == array.path]).all()
        for array in layout.arrays
    )


@PROPERTY
@given(survivable_losses(), st.sampled_from([0, 5, 1 << 30]))
def test_plan_moves_exactly_the_brute_force_lower_bound_for_any_loss(situation, min_cut_bytes):
    layout, holdings = situation
    plan = make_plan(layout, holdings, step=7, min_cut_bytes=min_cut_bytes)
    assert (plan.bytes_moved, plan.bytes_local) == brute_force_bytes(layout, holdings)
    assert plan.bytes_moved == plan.bytes_lower_bound


@PROPERTY
@given(survivable_losses())
def test_plan_takes_only_from_real_holdings(situation):
    layout, holdings = situation
    held = {(h.host, h.path, h.box, h.tier) for h in holdings}
    for transfer in make_plan(layout, holdings, step=7).transfers:
        assert (transfer.source, transfer.path, transfer.source_box, transfer.tier) in held


@PROPERTY
@given(losses())
def test_plan_is_refused_naming_array_and_missing_box_exactly_when_state_is_gone(situation):
    layout, holdings = situation
    if covered(layout, holdings):
        make_plan(layout, holdings, step=7)
        return
    with pytest.raises(MissingShardError) as info:
        make_plan(layout, holdings, step=7, lost=[HostId(9)])
    array = next(array for array in layout.arrays if array.path == info.value.path)
    remaining = mask_of(array.shape, [h.box for h in holdings if h.path == array.path])
    gone = mask_of(array.shape, [info.value.box])
    assert gone.any()
    assert not (gone & remaining).any()
    assert (info.value.step, info.value.lost) == (7, ("s9h0",))


@PROPERTY
@given(survivable_losses(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_holdings_or_arrays(situation, rng):
    layout, holdings = situation
    shuffled, arrays = list(holdings), list(layout.arrays)
    rng.shuffle(shuffled)
    rng.shuffle(arrays)
    other = make_plan(Layout(mesh=layout.mesh, arrays=tuple(arrays)), shuffled, step=7)
    assert other == make_plan(layout, holdings, step=7)


HOSTS = tuple(HostId(index) for index in range(4))


def replicated(hosts, nbytes, path="w"):
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(len(hosts),), hosts=tuple(hosts))
    return Layout(mesh=mesh, arrays=(ArrayLayout(path=path, shape=(nbytes,), dtype="uint8", itemsize=1),))


def partitioned(hosts, num_rows):
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(len(hosts),), hosts=tuple(hosts))
    array = ArrayLayout(path="w", shape=(num_rows, 2), dtype="float32", itemsize=4, spec=(("data",),))
    return Layout(mesh=mesh, arrays=(array,), elastic_axis="data")


def held(host, box, tier="shm", step=1, path="w"):
    return Holding(host=host, step=step, path=path, box=box, checksum=0, tier=tier)


def test_plan_refuses_a_partitioned_array_whose_slice_is_lost_without_a_replica():
    survivors_only = [h for h in layout_holdings(partitioned(HOSTS[:3], 12), step=1) if h.host != HOSTS[1]]
    with pytest.raises(MissingShardError, match=r"no surviving copy of 'w', box \[4:8, 0:2\] at step 1"):
        make_plan(partitioned([HOSTS[0], HOSTS[2]], 12), survivors_only, step=1)


def test_plan_never_mixes_steps():
    older = [held(HOSTS[0], ((0, 6),)), held(HOSTS[1], ((6, 12),), step=2)]
    with pytest.raises(MissingShardError, match=r"box \[6:12\] at step 1"):
        make_plan(replicated(HOSTS[:2], 12), older, step=1)


def test_plan_moves_nothing_when_every_host_keeps_its_boxes():
    layout = partitioned(HOSTS, 12)
    plan = make_plan(layout, layout_holdings(layout, step=1), step=1)
    assert (plan.bytes_moved, plan.bytes_local) == (0, 96)
    assert all(transfer.is_local for transfer in plan.transfers)


def test_plan_sends_an_element_once_to_a_host_whose_devices_all_need_it():
    target = replicated([HOSTS[1], HOSTS[1], HOSTS[1]], 10)
    plan = make_plan(target, [held(HOSTS[0], ((0, 10),))], step=1)
    assert plan.bytes_moved == 10


def test_plan_prefers_the_nearest_tier_on_the_target_itself():
    copies = [held(HOSTS[0], ((0, 8),), tier) for tier in reversed(TIERS)]
    plan = make_plan(replicated(HOSTS[:1], 8), copies, step=1)
    assert plan.bytes_by_tier() == {"device": 8}


def test_plan_prefers_host_memory_to_the_persistent_tier_when_both_are_remote():
    copies = [held(HOSTS[0], ((0, 8),), "persistent"), held(HOSTS[1], ((0, 8),), "peer")]
    copies += [held(HOSTS[0], ((0, 4),), "persistent"), held(HOSTS[3], ((2, 8),), "persistent")]
    plan = make_plan(replicated([HOSTS[2]], 8), copies, step=1)
    assert plan.bytes_by_tier() == {"peer": 8}
    alone = make_plan(replicated([HOSTS[2]], 8), copies[:1], step=1)
    assert alone.bytes_by_tier() == {"persistent": 8}


def test_plan_completes_a_persistent_rest_after_what_memory_has():
    copies = [held(HOSTS[0], ((0, 8),), "persistent"), held(HOSTS[1], ((2, 6),), "shm")]
    plan = make_plan(replicated([HOSTS[2]], 8), copies, step=1)
    assert plan.bytes_by_tier() == {"persistent": 4, "shm": 4}


def test_plan_balances_many_arrays_over_their_sources():
    mesh = replicated([HOSTS[3]], 1).mesh
    arrays = tuple(
        ArrayLayout(path=f"w{index}", shape=(1000 + index,), dtype="uint8", itemsize=1) for index in range(30)
    )
    holdings = [held(host, ((0, a.shape[0]),), path=a.path) for host in HOSTS[:3] for a in arrays]
    sent = make_plan(Layout(mesh=mesh, arrays=arrays), holdings, step=1).bytes_sent()
    assert sent.keys() == set(HOSTS[:3])
    assert max(sent.values()) - min(sent.values()) <= 1000  # no array is cut: they are too small


def test_plan_loads_a_source_without_alternative_last_when_there_is_a_choice():
    mesh = replicated([HOSTS[3]], 1).mesh
    arrays = tuple(ArrayLayout(path=path, shape=(50,), dtype="uint8", itemsize=1) for path in "ab")
    holdings = [held(HOSTS[0], ((0, 50),), path="b")]
    holdings += [held(host, ((0, 50),), path="a") for host in HOSTS[:2]]
    sent = make_plan(Layout(mesh=mesh, arrays=arrays), holdings, step=1).bytes_sent()
    assert sent == {HOSTS[0]: 50, HOSTS[1]: 50}


def test_plan_cuts_one_huge_array_so_that_all_its_sources_share_it():
    nbytes = 96 << 20
    holdings = [held(host, ((0, nbytes),)) for host in HOSTS[:3]]
    sent = make_plan(replicated([HOSTS[3]], nbytes), holdings, step=1).bytes_sent()
    assert max(sent.values()) <= 1.2 * nbytes / 3
    assert len(sent) == 3


def test_plan_cuts_no_array_into_parts_smaller_than_the_given_bytes():
    holdings = [held(host, ((0, 100),)) for host in HOSTS[:3]]
    for min_cut_bytes, sent in [(0, [33, 33, 34]), (33, [33, 33, 34]), (40, [100])]:
        plan = make_plan(replicated([HOSTS[3]], 100), holdings, step=1, min_cut_bytes=min_cut_bytes)
        assert sorted(plan.bytes_sent().values()) == sent


def test_plan_pieces_into_one_box_never_overlap_when_holdings_do():
    holdings = [held(HOSTS[0], ((0, 7),)), held(HOSTS[1], ((3, 10),)), held(HOSTS[1], ((5, 6),))]
    transfers = make_plan(replicated([HOSTS[2]], 10), holdings, step=1).for_target(HOSTS[2])
    pieces = [transfer.piece for transfer in transfers]
    assert sum(transfer.nbytes for transfer in transfers) == 10
    assert not any(intersect(a, b) for index, a in enumerate(pieces) for b in pieces[:index])


def test_plan_has_no_transfer_for_an_empty_array_and_needs_no_holding_of_it():
    plan = make_plan(replicated(HOSTS[:2], 0), [], step=1)
    assert plan.transfers == ()


def test_plan_ignores_holdings_of_arrays_the_layout_lacks():
    plan = make_plan(
        replicated(HOSTS[:1], 4), [held(HOSTS[0], ((0, 4),)), held(HOSTS[0], (), path="x")], step=1
    )
    assert plan.bytes_local == 4


def test_plan_refuses_a_holding_outside_its_array():
    with pytest.raises(UsageError, match="outside an array of shape"):
        make_plan(replicated(HOSTS[:1], 4), [held(HOSTS[0], ((0, 5),))], step=1)


def test_plan_takes_from_the_targets_own_slice_when_that_is_faster_to_reach():
    hosts = [HostId(0, 0), HostId(0, 1), HostId(1, 0)]
    copies = [held(hosts[0], ((0, 9),)), held(hosts[2], ((0, 9),))]
    plan = make_plan(replicated([hosts[1]], 9), copies, step=1, min_cut_bytes=0)
    assert plan.bytes_sent() == {hosts[0]: 9}
    alike = Links(same_slice=1.0, other_slice=1.0)
    plan = make_plan(replicated([hosts[1]], 9), copies, step=1, links=alike, min_cut_bytes=0)
    assert sorted(plan.bytes_sent().values()) == [4, 5]


def test_plan_takes_from_another_slice_only_what_its_own_lacks():
    hosts = [HostId(0, 0), HostId(0, 1), HostId(1, 0)]
    copies = [held(hosts[0], ((0, 4),)), held(hosts[2], ((0, 9),))]
    assert make_plan(replicated([hosts[1]], 9), copies, step=1).bytes_sent() == {hosts[0]: 4, hosts[2]: 5}


def test_links_refuse_a_bandwidth_that_is_not_positive():
    with pytest.raises(UsageError, match="positive bandwidths"):
        Links(same_slice=0.0)


def ring_of_copies(num_slices, lost, num_arrays=64, rows=1 << 14):
    """Every array cut over the slices, each part on its own slice and the next one; one slice is lost."""
    mesh = MeshLayout(
        axis_names=("data",), axis_sizes=(num_slices,), hosts=tuple(map(HostId, range(num_slices)))
    )
    arrays = tuple(
        ArrayLayout(
            path=f"w{n:02}", shape=(num_slices * rows,), dtype="float32", itemsize=4, spec=(("data",),)
        )
        for n in range(num_arrays)
    )
    own = layout_holdings(Layout(mesh=mesh, arrays=arrays), step=1)
    buddies = [replace(h, host=HostId((h.host.slice_index + 1) % num_slices), tier="peer") for h in own]
    return arrays, [h for h in (*own, *buddies) if h.host.slice_index != lost]


def test_plan_evens_out_the_sources_within_a_twentieth_of_the_best_possible():
    """8 slices hold two copies of each part; one is lost, and each slice left needs all of every array."""
    arrays, holdings = ring_of_copies(8, lost=3)
    left = tuple(host for host in map(HostId, range(8)) if host.slice_index != 3)
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(7,), hosts=left)
    target = Layout(mesh=mesh, arrays=tuple(replace(array, spec=()) for array in arrays))
    plan = make_plan(target, holdings, step=1)
    assert plan.bytes_moved == 7 * 6 * 8 * (64 << 14) // 8 * 4
    assert max(plan.bytes_sent().values()) <= 1.05 * plan.bytes_moved / 7


def test_plan_has_few_sources_for_a_target_however_many_arrays_there_are():
    arrays, holdings = ring_of_copies(8, lost=3)
    plan = make_plan(
        Layout(mesh=replicated([HostId(9)], 1).mesh, arrays=tuple(replace(a, spec=()) for a in arrays)),
        holdings,
        step=1,
    )
    assert sum(len(group.nbytes) for group in plan.groups) <= 3 * 8  # not one for each of 64 arrays
    assert len(plan.for_target(HostId(9))) <= 64 * 8 + 8


@PROPERTY
@given(survivable_losses())
def test_plan_reuses_a_box_exactly_where_the_target_has_it_whole(situation):
    layout, holdings = situation
    held_boxes = {(h.host, h.path, h.box) for h in holdings}
    wanted = [
        (host, array, box)
        for array in layout.arrays
        for host, boxes in layout.boxes_by_host(array).items()
        for box in boxes
    ]
    plan = make_plan(layout, holdings, step=7)
    whole = sum(array.box_nbytes(box) for host, array, box in wanted if (host, array.path, box) in held_boxes)
    assert plan.bytes_reused <= whole
    if all(len([h for h in holdings if (h.host, h.path) == (host, a.path)]) <= 1 for host, a, _ in wanted):
        assert plan.bytes_reused == whole


def test_plan_names_the_first_missing_array_of_those_alike_as_the_layout_has_them():
    arrays = replicated(HOSTS[:1], 4, "b").arrays + replicated(HOSTS[:1], 4, "a").arrays
    with pytest.raises(MissingShardError, match="no surviving copy of 'b'"):
        make_plan(Layout(mesh=replicated(HOSTS[:1], 4).mesh, arrays=arrays), [], step=1)


def test_plan_refuses_a_holding_of_another_rank_and_ignores_one_of_an_array_the_layout_lacks():
    copies = [
        held(HOSTS[0], ((0, 4),)),
        held(HOSTS[1], ((0, 4), (0, 2)), path="x"),
        held(HOSTS[1], (), path="x"),
    ]
    assert make_plan(replicated(HOSTS[:1], 4), copies, step=1).bytes_local == 4
    with pytest.raises(UsageError, match="outside an array of shape"):
        make_plan(replicated(HOSTS[:1], 4), [*copies, held(HOSTS[1], ((0, 4), (0, 2)))], step=1)


def test_plan_counts_arrays_of_a_trillion_elements():
    num = 10**12
    mesh = replicated(HOSTS, 1).mesh
    array = ArrayLayout(path="w", shape=(num,), dtype="complex128", itemsize=16)
    plan = make_plan(Layout(mesh=mesh, arrays=(array,)), [held(HOSTS[0], ((0, num),))], step=1)
    assert (plan.bytes_moved, plan.bytes_local) == (3 * 16 * num, 16 * num)


def test_plan_refuses_boxes_that_fall_into_more_pieces_than_memory_holds():
    """400 boxes on as many hosts, all of which begin and end elsewhere in three dims."""
    array = ArrayLayout(path="w", shape=(2000,) * 3, dtype="uint8", itemsize=1)
    copies = [held(HostId(n), ((n, 1000 + n),) * 3) for n in range(400)]
    with pytest.raises(UsageError, match="'w' falls into 26,112,000,000 pieces"):
        make_plan(Layout(mesh=replicated(HOSTS[:1], 1).mesh, arrays=(array,)), copies, step=1)
