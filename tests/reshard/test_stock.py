import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.boxes import volume
from reshard.errors import UsageError
from reshard.holdings import TIERS, layout_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.planner import make_plan
from reshard.stock import HeldGroup, Stock


def shards(stock):
    """The model: every (host, path, box, tier) with elements that the stock has."""
    found = set()
    for group in stock.groups:
        boxes = [tuple(map(tuple, box)) for box in group.boxes.tolist()]
        for host, box, tier in zip(group.host, group.box, group.tier, strict=True):
            if volume(boxes[box]):
                found |= {(stock.hosts[host], path, boxes[box], TIERS[tier]) for path in group.paths}
    return found


def model(holdings):
    return {(h.host, h.path, h.box, h.tier) for h in holdings if volume(h.box)}


@PROPERTY
@given(layout_pairs())
def test_stock_of_a_layout_has_what_its_holdings_have(pair):
    layout, _ = pair
    holdings = layout_holdings(layout, step=3)
    assert shards(Stock.of_layout(layout)) == model(holdings) == shards(Stock.of_holdings(holdings, 3))


@PROPERTY
@given(layout_pairs(), st.sets(st.integers(0, 4)), st.sampled_from(TIERS))
def test_stock_without_lost_hosts_and_with_others_has_the_rest_of_both(pair, lost_slices, tier):
    old, new = pair
    lost = [host for host in old.mesh.hosts if host.slice_index in lost_slices]
    stock = Stock.of_layout(old).without(lost).merged(Stock.of_layout(new, tier))
    left = [h for h in layout_holdings(old, step=3) if h.host not in lost]
    assert shards(stock) == model(left) | model(layout_holdings(new, step=3, tier=tier))


@PROPERTY
@given(layout_pairs())
def test_plan_from_a_stock_moves_the_same_bytes_as_from_its_holdings(pair):
    old, new = pair
    holdings = layout_holdings(old, step=3)
    plan, other = (make_plan(new, held, step=3) for held in (holdings, Stock.of_layout(old)))
    assert (plan.bytes_moved, plan.bytes_local) == (other.bytes_moved, other.bytes_local)
    assert plan.bytes_reused == other.bytes_reused


def test_stock_of_holdings_takes_one_step_only():
    layout = Layout(
        mesh=MeshLayout(axis_names=("data",), axis_sizes=(1,), hosts=(HostId(0),)),
        arrays=(ArrayLayout(path="w", shape=(4,), dtype="uint8", itemsize=1),),
    )
    assert Stock.of_holdings(layout_holdings(layout, step=3), step=4).groups == ()


def test_stock_writes_arrays_that_are_held_alike_once_and_shares_columns_between_shapes():
    arrays = tuple(
        ArrayLayout(path=f"w{n}", shape=(4 * (n % 2 + 1),), dtype="uint8", itemsize=1, spec=(("data",),))
        for n in range(6)
    )
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=(HostId(0), HostId(1)))
    groups = Stock.of_layout(Layout(mesh=mesh, arrays=arrays)).groups
    assert [group.paths for group in groups] == [("w0", "w2", "w4"), ("w1", "w3", "w5")]
    assert groups[0].host is groups[1].host
    left = Stock.of_layout(Layout(mesh=mesh, arrays=arrays)).without([HostId(0)]).groups
    assert left[0].host is left[1].host


def test_group_refuses_columns_that_do_not_agree():
    group = Stock.of_holdings(
        layout_holdings(
            Layout(
                mesh=MeshLayout(axis_names=("data",), axis_sizes=(1,), hosts=(HostId(0),)),
                arrays=(ArrayLayout(path="w", shape=(4,), dtype="uint8", itemsize=1),),
            ),
            step=1,
        ),
        1,
    ).groups[0]
    columns = {"table": group.table, "host": group.host, "box": group.box, "tier": group.tier}
    with pytest.raises(UsageError, match="columns of different lengths"):
        HeldGroup(paths=("w",), edges=group.edges, **columns | {"tier": group.tier[:0]})
    with pytest.raises(UsageError, match="not as many dims"):
        HeldGroup(paths=("w",), edges=(), **columns)
