"""Shares at thousands of hosts: even, in few patterns, other copies of a host's boxes on several hosts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.persist_shares import persist_shares
from reshard.redundancy import buddy_stock, capture_stock
from reshard.redundancy_dealing import FEW_PATTERNS, deal

D, FFN, KV, VOCAB = 4096, 14336, 1024, 128256  # 8B-like: arrays are few and unequal for 2,048 hosts
CHIPS_A_HOST = 4


def transformer(*, num_layers, rows):
    """Params and two moments, partitioned as on real meshes: matrices in two dims, norms in one."""
    by_rows, by_columns, norm = (rows, ("tensor",)), (("tensor",), rows), (rows,)
    layer = [((D, D), by_rows), ((D, KV), by_rows), ((D, KV), by_rows), ((D, D), by_columns)]
    layer += [((D, FFN), by_rows), ((D, FFN), by_rows), ((FFN, D), by_columns), ((D,), norm), ((D,), norm)]
    ends = [((VOCAB, D), by_columns), ((D, VOCAB), by_rows), ((D,), norm), ((), ())]
    return tuple(
        ArrayLayout(path=f"{part}/{index:04}", shape=shape, dtype="float32", itemsize=4, spec=spec)
        for part in ("params", "mu", "nu")
        for index, (shape, spec) in enumerate(layer * num_layers + ends)
    )


def big_layout(num_slices, hosts_per_slice, *, over_slices=False, num_layers=32):
    hosts = [HostId(s, h) for s in range(num_slices) for h in range(hosts_per_slice)]
    fsdp = hosts_per_slice * CHIPS_A_HOST // 8
    rows = ("data", "fsdp") if over_slices else ("fsdp",)
    mesh = MeshLayout(
        axis_names=("data", "fsdp", "tensor"),
        axis_sizes=(num_slices, fsdp, 8),
        hosts=tuple(host for host in hosts for _ in range(CHIPS_A_HOST)),
    )
    return Layout(mesh=mesh, arrays=transformer(num_layers=num_layers, rows=rows), elastic_axis="data")


def loads_of(layout, stock):
    itemsize = {array.path: array.itemsize for array in layout.arrays}
    loads = np.zeros(len(stock.hosts), np.int64)
    for group in stock.groups:
        boxes = group.boxes
        nbytes = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1) * sum(itemsize[path] for path in group.paths)
        np.add.at(loads, group.host, nbytes[group.box])
    return loads


@pytest.mark.parametrize(
    ("num_slices", "hosts_per_slice", "tolerance"),
    [(32, 64, 0.002), (31, 64, 0.02), (8, 256, 0.001), (7, 256, 0.02), (3, 512, 0.001)],
)
def test_shares_of_two_thousand_hosts_are_even(num_slices, hosts_per_slice, tolerance):
    layout = big_layout(num_slices, hosts_per_slice)
    loads = loads_of(layout, capture_stock(layout, 2))
    assert loads.sum() == 2 * sum(array.nbytes for array in layout.arrays)
    assert loads.max() <= (1 + tolerance) * loads.mean()
    assert loads.min() >= (1 - tolerance) * loads.mean()


def test_shares_stay_within_a_box_when_hosts_capture_a_few_large_ones():
    """128 slices: of 2 copies of 128 a host has little, and the largest box is a third of it."""
    layout = big_layout(128, 16)
    loads = loads_of(layout, capture_stock(layout, 2))
    largest = VOCAB * D * 4 / 64
    assert 0.3 < largest / loads.mean() < 0.4
    assert loads.max() <= 1.05 * loads.mean()
    assert loads.min() >= 0.95 * loads.mean()


def test_buddies_of_two_thousand_hosts_keep_equally_much():
    layout = big_layout(32, 64, over_slices=True)
    captured, kept = capture_stock(layout, 2), buddy_stock(layout, 2)
    loads = loads_of(layout, kept)
    assert loads.min() >= 0.999 * loads.max()
    assert loads.max() == pytest.approx(loads_of(layout, captured).max(), rel=0.001)


def test_arrays_partitioned_alike_share_few_columns():
    stock = capture_stock(big_layout(32, 64), 2)
    columns = {(id(group.table), id(group.host), id(group.box), id(group.tier)) for group in stock.groups}
    assert len(stock.groups) < 200
    assert len(columns) <= 8 + 8 + 64 + 3  # matrices by rows, by columns, norms; a counter in each part


def test_copies_of_what_a_slice_loses_are_on_several_slices():
    layout = big_layout(32, 64)
    stock = capture_stock(layout, 2)
    slice_of = np.array([host.slice_index for host in stock.hosts])
    alone = np.zeros(len(stock.hosts), np.int64)
    for group in stock.groups:
        nbytes = (group.boxes[:, :, 1] - group.boxes[:, :, 0]).prod(axis=1) * 4 * len(group.paths)
        lost = np.isin(group.box, group.box[slice_of[group.host] == 7]) & (slice_of[group.host] != 7)
        np.add.at(alone, group.host[lost], nbytes[group.box[lost]])
    assert alone.max() <= 0.55 * loads_of(layout, stock).mean()


def test_shares_of_writing_are_even_too():
    layout = big_layout(8, 8, num_layers=8)
    itemsize = {array.path: array.itemsize for array in layout.arrays}
    loads = [
        sum(int(np.prod([stop - start for start, stop in box])) * itemsize[path] for path, box in shards)
        for shards in persist_shares(layout, 2).values()
    ]
    assert max(loads) <= 1.02 * min(loads)


@PROPERTY
@given(layout_pairs().map(lambda pair: pair[0]), st.integers(1, 4), st.randoms(use_true_random=False))
def test_dealing_has_every_array_once_and_does_not_depend_on_their_order(layout, replicas, rng):
    arrays = list(layout.arrays)
    rng.shuffle(arrays)
    dealing = deal(layout, replicas)
    again = deal(Layout(mesh=layout.mesh, arrays=tuple(arrays)), replicas)
    assert sorted(path for group in dealing.groups for path in group.paths) == sorted(a.path for a in arrays)
    assert sorted(rank for group in dealing.groups for rank in group.ranks) == list(range(len(arrays)))
    for group, other in zip(dealing.groups, again.groups, strict=True):
        assert (group.paths, group.ranks, group.pattern) == (other.paths, other.ranks, other.pattern)
        assert group.host.tolist() == other.host.tolist()


def test_dealing_refuses_a_host_outside_the_mesh_and_less_than_one_replica():
    layout = big_layout(2, 2, num_layers=1)
    with pytest.raises(UsageError, match="s5h0 is not a host of the mesh"):
        deal(layout, 2).index_of(HostId(5))
    with pytest.raises(UsageError, match="replicas must be at least 1, got 0"):
        deal(layout, 0)


def test_small_arrays_that_many_hosts_hold_take_few_patterns_and_leave_shares_even():
    hosts = tuple(HostId(s, h) for s in range(8) for h in range(16))
    mesh = MeshLayout(axis_names=("data", "fsdp"), axis_sizes=(8, 16), hosts=hosts)
    large = [
        ArrayLayout(path=f"w{n:03}", shape=(16 << 14,), dtype="float32", itemsize=4, spec=(("fsdp",),))
        for n in range(64)
    ]
    norms = [ArrayLayout(path=f"n{n:03}", shape=(64,), dtype="float32", itemsize=4) for n in range(300)]
    layout = Layout(mesh=mesh, arrays=(*large, *norms))
    norm_groups = [group for group in deal(layout, 2).groups if group.paths[0].startswith("n")]
    assert sum(len(group.paths) for group in norm_groups) == 300
    assert len(norm_groups) == FEW_PATTERNS
    shares = list(capture_stock(layout, 2).bytes_by_host(layout).values())
    assert max(shares) <= 1.01 * sum(shares) / len(shares)
