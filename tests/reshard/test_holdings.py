import msgspec
import pytest

from reshard.errors import UsageError
from reshard.holdings import TIERS, Holding, layout_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout

LAYOUT = Layout(
    mesh=MeshLayout(
        axis_names=("data", "model"), axis_sizes=(2, 2), hosts=(HostId(0), HostId(0), HostId(1), HostId(1))
    ),
    arrays=(
        ArrayLayout(path="w", shape=(4, 2), dtype="float32", itemsize=4, spec=((), ("model",))),
        ArrayLayout(path="step", shape=(), dtype="int32", itemsize=4),
    ),
)


def make(**changes):
    values = {"host": HostId(0), "step": 3, "path": "w", "box": ((0, 4),), "checksum": 7, "tier": "shm"}
    return Holding(**values | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "below zero"),
        ({"tier": "tape"}, "'tape' is not a tier; one of device, shm, peer, persistent"),
        ({"box": ((4, 0),)}, "is not a box"),
        ({"box": ((0, 10**30),)}, "beyond any array"),
    ],
)
def test_holding_refuses_impossible_values(changes, message):
    with pytest.raises(UsageError, match=message):
        make(**changes)


def test_holding_reads_back_equal_from_json():
    assert msgspec.json.decode(msgspec.json.encode(make()), type=Holding) == make()


def test_tiers_are_listed_nearest_first():
    assert TIERS == ("device", "shm", "peer", "persistent")


def test_layout_holdings_list_each_distinct_box_once_a_host():
    held = layout_holdings(LAYOUT, step=5, tier="device")
    assert [(str(h.host), h.path, h.box) for h in held] == [
        ("s0h0", "w", ((0, 4), (0, 1))),
        ("s0h0", "w", ((0, 4), (1, 2))),
        ("s1h0", "w", ((0, 4), (0, 1))),
        ("s1h0", "w", ((0, 4), (1, 2))),
        ("s0h0", "step", ()),
        ("s1h0", "step", ()),
    ]
    assert {(h.step, h.tier) for h in held} == {(5, "device")}
