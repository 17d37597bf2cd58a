import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.errors import InvariantBrokenError, UsageError
from reshard.holdings import Holding, layout_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.plan import Plan
from reshard.planner import make_plan

A, B, C = HostId(0), HostId(1), HostId(2)


MESH = MeshLayout(axis_names=("data",), axis_sizes=(3,), hosts=(A, B, C))
LAYOUT = Layout(
    mesh=MESH,
    arrays=(
        ArrayLayout(path="v", shape=(6,), dtype="uint8", itemsize=1, spec=(("data",),)),
        ArrayLayout(path="w", shape=(2, 4), dtype="float32", itemsize=4),
    ),
)


def held(host, path, box, tier="shm"):
    return Holding(host=host, step=9, path=path, box=box, checksum=0, tier=tier)


WHOLE = ((0, 2), (0, 4))
PLAN = make_plan(
    LAYOUT,
    [held(A, "v", ((0, 6),)), held(A, "w", WHOLE, "peer"), held(B, "w", WHOLE), held(B, "v", ((2, 4),))],
    step=9,
)


@PROPERTY
@given(layout_pairs(), st.sampled_from([0, 1 << 20]))
def test_plan_reads_back_equal_from_its_json(pair, min_cut_bytes):
    old, new = pair
    plan = make_plan(new, layout_holdings(old, step=7), step=7, min_cut_bytes=min_cut_bytes)
    for data in (plan.to_json(), plan.to_json().decode()):
        again = Plan.from_json(data)
        assert again == plan
        assert again.transfers == plan.transfers
        assert (again.bytes_local, again.bytes_reused) == (plan.bytes_local, plan.bytes_reused)


NO_GROUPS = b'{"step": 1, "hosts": [%s], "bytes_lower_bound": 0, "groups": [], "more": %s}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"step": "x"}',
        b'{"step": 1, "groups": [{}]}',
        NO_GROUPS % (b'"s0h0", "s0h0"', b"0"),
        NO_GROUPS % (b"", b"[" * 100_000 + b"]" * 100_000),
        (NO_GROUPS % (b"", b"0")).replace(b'"step": 1', b'"step": -1'),
    ],
    ids=lambda data: data[:40],
)
def test_plan_refuses_json_that_is_no_plan(data):
    with pytest.raises(UsageError, match="this is not a plan"):
        Plan.from_json(data)


def changed(change):
    plan = json.loads(PLAN.to_json())
    change(plan["groups"][0])
    return json.dumps(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda group: group["rows"]["piece"].__setitem__(0, 99), "names a box that the plan does not have"),
        (lambda group: group["rows"]["piece"].__setitem__(0, -1), "a number below zero"),
        (lambda group: group["rows"]["target"].__setitem__(0, 3), "names a host that the plan does not have"),
        (lambda group: group["rows"]["stop"].__setitem__(0, 9), "some that the plan does not have"),
        (lambda group: group["rows"]["stop"].__setitem__(0, 0), "has no arrays"),
        (lambda group: group["rows"]["tier"].__setitem__(0, 4), "an unknown tier"),
        (lambda group: group["rows"]["piece"].__setitem__(0, 1), "not inside both boxes"),
        (lambda group: group["rows"]["cut_stop"].__setitem__(0, 3), "cut outside its piece"),
        (lambda group: group["rows"].pop("tier"), "this is not a plan"),
        (lambda group: group["rows"]["tier"].pop(), "columns of different lengths"),
        (lambda group: group["classes"].clear(), "this is not a plan"),
        (lambda group: group["rows"]["piece"].__setitem__(0, 2**70), "this is not a plan"),
        (lambda group: group["classes"][0]["edges"][0].__setitem__(0, 99), "do not ascend"),
        (
            lambda group: group["classes"][0]["edges"][0].__setitem__(-1, 2**62 + 1),
            "more bytes than can be counted",
        ),
        (lambda group: group["classes"][0].__setitem__("itemsize", 0), "without names or bytes"),
        (lambda group: group["low"].__setitem__(0, [-1] * len(group["low"][0])), "not between the edges"),
        (lambda group: group["high"].__setitem__(0, [99] * len(group["high"][0])), "not between the edges"),
    ],
)
def test_plan_refuses_json_with_rows_that_do_not_fit(change, message):
    with pytest.raises(UsageError, match=message):
        Plan.from_json(changed(change))


def test_plan_refuses_to_move_another_number_of_bytes_than_the_lower_bound():
    plan = json.loads(PLAN.to_json())
    plan["bytes_lower_bound"] -= 1
    with pytest.raises(InvariantBrokenError, match="moves 34 bytes, the lower bound is 33"):
        Plan.from_json(json.dumps(plan))


def test_plan_tells_local_copies_from_boxes_that_need_none():
    assert (PLAN.bytes_moved, PLAN.bytes_local, PLAN.bytes_reused) == (34, 68, 66)
    reused = [t for t in PLAN.transfers if t.is_reuse]
    assert sorted((t.target, t.path) for t in reused) == [(A, "w"), (B, "v"), (B, "w")]


def test_plan_is_sorted_by_target_and_adds_up():
    assert [item.target for item in PLAN.transfers] == [A, A, B, B, C, C]
    assert sum(PLAN.bytes_sent().values()) == 34
    assert PLAN.bytes_received() == {C: 34}
    assert sum(PLAN.bytes_by_tier().values()) == 102


def test_plan_for_target_gives_one_hosts_transfers_with_local_ones():
    assert [item.source for item in PLAN.for_target(B)] == [B, B]
    assert PLAN.for_target(HostId(8)) == ()


def test_plan_that_is_empty_moves_nothing():
    assert Plan.empty(4).transfers == ()
    assert Plan.from_json(Plan.empty(4).to_json()) == Plan.empty(4)


def test_plan_table_shows_routes_and_totals():
    lines = PLAN.table().splitlines()
    assert lines[0] == "target     source     from       transfers              bytes"
    assert lines[1] == "s0h0       itself     shm                1                  2"
    assert lines[-1] == ("step 9: 34 bytes over the network (lower bound 34), 68 local (66 need no copy)")
    assert PLAN.table(max_routes=1).splitlines()[2] == f"and {len(lines) - 3} more routes with 68 bytes"


@PROPERTY
@given(layout_pairs(), st.integers(1, 300))
def test_rounds_have_every_array_once_and_keep_the_bound_on_every_host(pair, max_bytes):
    old, new = pair
    rounds = make_plan(new, layout_holdings(old, step=7), step=7).rounds(max_bytes)
    paths = [path for of_round in rounds for path in of_round]
    assert sorted(paths) == sorted(array.path for array in new.arrays if array.nbytes)
    arrays = {array.path: array for array in new.arrays}
    for of_round in rounds:
        for host in new.mesh.distinct_hosts():
            nbytes = sum(
                arrays[path].box_nbytes(box)
                for path in of_round
                for box in new.boxes_by_host(arrays[path])[host]
            )
            assert nbytes <= max_bytes or len(of_round) == 1


def test_rounds_refuse_a_bound_below_one_byte():
    with pytest.raises(UsageError, match="at least a byte"):
        PLAN.rounds(0)
