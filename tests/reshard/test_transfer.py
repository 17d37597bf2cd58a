import pytest

from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.transfer import Transfer

A, B = HostId(0), HostId(1)


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


def test_transfer_is_a_reuse_only_of_the_very_box_on_the_host_itself():
    box = ((2, 4), (0, 2))
    whole = {"source_box": box, "piece": box, "target_box": box}
    assert transfer(target=A, **whole).is_reuse
    assert not transfer(**whole).is_reuse
    assert not transfer(target=A, piece=((2, 3), (0, 2)), nbytes=8).is_reuse
