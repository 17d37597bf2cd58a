import pytest
from hypothesis import given
from reshard_strategies import PROPERTY, layout_pairs

from reshard.errors import UsageError
from reshard.holdings import layout_holdings
from reshard.ids import HostId
from reshard.plan import Plan, Transfer
from reshard.planner import make_plan

A, B, C = HostId(0), HostId(1), HostId(2)


def transfer(**changes):
    values = {
        "path": "w",
        "source": A,
        "target": B,
        "source_box": ((0, 4), (0, 2)),
        "piece": ((2, 4), (0, 2)),
        "target_box": ((2, 6), (0, 2)),
        "nbytes": 16,
    }
    return Transfer(**values | changes)


LOCAL = transfer(target=A, piece=((2, 3), (0, 2)), nbytes=8)
PLAN = Plan.of(9, [transfer(), LOCAL, transfer(target=C, tier="peer")], bytes_lower_bound=32)


@PROPERTY
@given(layout_pairs())
def test_plan_reads_back_equal_from_its_json(pair):
    old, new = pair
    plan = make_plan(new, layout_holdings(old, step=7), step=7)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json().decode()) == plan


@pytest.mark.parametrize("data", [b"", b"[]", b'{"step": "x"}'])
def test_plan_refuses_json_that_is_no_plan(data):
    with pytest.raises(UsageError, match="this is not a plan"):
        Plan.from_json(data)


def test_plan_refuses_json_whose_sums_were_changed():
    with pytest.raises(UsageError, match="its transfers 32 and 8"):
        Plan.from_json(PLAN.to_json().replace(b'"bytes_moved":32', b'"bytes_moved":31'))


def test_plan_is_sorted_by_target_and_adds_up():
    assert [item.target for item in PLAN.transfers] == [A, B, C]
    assert (PLAN.bytes_moved, PLAN.bytes_local) == (32, 8)
    assert PLAN.bytes_sent() == {A: 32}
    assert PLAN.bytes_by_tier() == {"peer": 16, "shm": 24}


def test_plan_for_target_gives_one_hosts_transfers_with_local_ones():
    assert PLAN.for_target(A) == (LOCAL,)
    assert PLAN.for_target(B) == (transfer(),)
    assert PLAN.for_target(HostId(8)) == ()


def test_plan_table_shows_routes_and_totals():
    assert PLAN.table().splitlines() == [
        "target     source     from       transfers              bytes",
        "s0h0       itself     shm                1                  8",
        "s1h0       s0h0       shm                1                 16",
        "s2h0       s0h0       peer               1                 16",
        "step 9: 32 bytes over the network (lower bound 32), 8 local",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"piece": ((3, 5), (0, 2))}, "not inside both boxes"),
        ({"piece": ((1, 3), (0, 2))}, "not inside both boxes"),
        ({"piece": ((2, 4),)}, "not inside both boxes"),
        ({"piece": ((2, 2), (0, 2))}, "16 bytes for 0 elements"),
        ({"nbytes": 0}, "0 bytes for 4 elements"),
        ({"nbytes": 15}, "15 bytes for 4 elements"),
    ],
)
def test_transfer_refuses_contradictions_on_construction(changes, message):
    with pytest.raises(UsageError, match=message):
        transfer(**changes)


def test_transfer_prints_what_goes_where():
    assert str(transfer()) == "w[2:4, 0:2] s0h0 → s1h0"
    assert transfer().itemsize == 4
