import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.copies import device_positions
from reshard.copy_numbers import ShardNumbers, captured_by_host, held_by_host
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.redundancy import captures

layouts = layout_pairs().map(lambda pair: pair[0])


@PROPERTY
@given(layouts, st.integers(1, 4))
def test_numbers_of_a_host_name_what_it_captures_in_order(layout, replicas):
    numbers = ShardNumbers(layout)
    by_host = captured_by_host(layout, replicas, numbers)
    for host, shards in captures(layout, replicas).items():
        assert tuple(numbers[number] for number in by_host[host].tolist()) == shards


@PROPERTY
@given(layouts)
def test_numbers_of_devices_name_the_boxes_they_hold_and_equal_boxes_have_one(layout):
    numbers = ShardNumbers(layout)
    positions = device_positions(layout)
    by_host = held_by_host(layout, positions, numbers)
    number_of = {}
    for host, own in positions.items():
        held = [(array.path, layout.boxes(array)[at]) for array in layout.arrays for at in own.tolist()]
        for number, shard in zip(by_host[host].tolist(), held, strict=True):
            assert numbers[number] == shard
            assert number_of.setdefault(shard, number) == number


def test_numbers_are_made_for_hosts_of_the_mesh_alone_and_once():
    mesh = MeshLayout(axis_names=("d",), axis_sizes=(2,), hosts=(HostId(0), HostId(1)))
    layout = Layout(
        mesh=mesh, arrays=(ArrayLayout(path="w", shape=(4,), dtype="int8", itemsize=1, spec=(("d",),)),)
    )
    numbers = ShardNumbers(layout)
    by_host = captured_by_host(layout, 2, numbers)
    assert list(by_host) == [HostId(0), HostId(1)]
    assert len(by_host) == 2
    assert HostId(2) not in by_host
    assert by_host[HostId(1)] is by_host[HostId(1)]
    np.testing.assert_array_equal(by_host[HostId(1)], [1])
    assert len(numbers) == 2
    with pytest.raises(IndexError):
        numbers[2]
