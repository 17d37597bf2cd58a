import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, meshes, specs

from reshard.grid import placement
from reshard.ids import HostId
from reshard.layout import MeshLayout
from reshard.redundancy_patterns import MAX_PATTERNS, patterns, slice_numbers


def grid_mesh(num_slices, hosts_per_slice, chips=1):
    hosts = tuple(
        HostId(s, h) for s in range(num_slices) for h in range(hosts_per_slice) for _ in range(chips)
    )
    return MeshLayout(
        axis_names=("slice", "host", "chip"), axis_sizes=(num_slices, hosts_per_slice, chips), hosts=hosts
    )


@PROPERTY
@given(meshes(), st.data(), st.integers(1, 4), st.integers(1, 40))
def test_rows_are_copies_on_different_slices_of_hosts_that_hold_the_box(mesh, data, replicas, num_arrays):
    spec = data.draw(specs(mesh.axis_names, 2))
    made = patterns(mesh, spec, replicas, num_arrays)
    held = placement(mesh, spec)
    slice_of, _ = slice_numbers(mesh)
    holds = set(zip(held.host.tolist(), held.box.tolist(), strict=True))
    assert 1 <= made.num_patterns <= num_arrays
    assert made.box.tolist() == sorted(made.box.tolist())
    for host in made.host:
        assert set(zip(host.tolist(), made.box.tolist(), strict=True)) <= holds
        for box in range(len(made.num_copies)):
            rows = slice(made.first_row[box], made.first_row[box] + made.num_copies[box])
            assert set(made.box[rows].tolist()) == {box}
            slices = {int(slice_of[h]) for h, b in holds if b == box}
            assert made.num_slices[box] == len(slices)
            assert (
                len(set(slice_of[host[rows]].tolist())) == made.num_copies[box] == min(replicas, len(slices))
            )


@PROPERTY
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_holder_has_equally_much_over_all_patterns(num_slices, hosts_per_slice, chips, replicas):
    mesh = grid_mesh(num_slices, hosts_per_slice, chips)
    for spec in ((), (("chip",),), (("host",),), (("host", "chip"),), (("slice",), ("chip",))):
        made = patterns(mesh, spec, replicas, num_arrays=10**6)
        counts = np.bincount(made.host.ravel(), minlength=num_slices * hosts_per_slice)
        assert len(set(counts.tolist())) == 1


@PROPERTY
@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 5), st.integers(2, 3))
def test_what_a_host_has_is_not_all_had_by_one_other(num_slices, hosts_per_slice, chips, replicas):
    """So that when it is lost, several hold the other copies of its boxes, and share the work."""
    mesh = grid_mesh(num_slices, hosts_per_slice, chips)
    made = patterns(mesh, (("host", "chip"),), replicas, num_arrays=10**6)
    first = made.host == 0
    pairs = zip(*(index.tolist() for index in np.nonzero(first)), strict=True)
    others = {
        int(other)
        for pattern, row in pairs
        for other in made.host[pattern][made.box == made.box[row]]
        if other != 0
    }
    assert len(others) >= min(2, num_slices - 1)


@pytest.mark.parametrize(
    ("num_slices", "hosts", "chips", "spec", "expected"),
    [
        (32, 2, 4, (("host", "chip"),), 8),  # 8 copies a pool: 4 times round 32 slices, then one slice later
        (31, 2, 4, (("host", "chip"),), 31),
        (3, 1, 1, (), 3),
        (2, 1, 1, (), 1),  # no choice
        (2, 3, 1, (), 3),  # the hosts of a slice by turns
        (4, 2, 2, (("slice", "host", "chip"),), 1),
    ],
)
def test_there_are_as_few_patterns_as_make_holders_equal(num_slices, hosts, chips, spec, expected):
    assert patterns(grid_mesh(num_slices, hosts, chips), spec, 2, num_arrays=1000).num_patterns == expected


def test_patterns_stay_few_when_pools_differ():
    """Slices with 1, 2, 3, 5 and 7 chips on their hosts: their boxes have different holders."""
    hosts = tuple(
        HostId(s, h) for s, size in enumerate((1, 2, 3, 5, 7)) for h in range(size) for _ in range(2)
    )
    mesh = MeshLayout(axis_names=("x", "y"), axis_sizes=(12, 3), hosts=hosts)
    made = patterns(mesh, (("y",),), 2, num_arrays=10**6)
    assert made.num_patterns <= max(MAX_PATTERNS, math.lcm(5, 7) * 2)
    assert patterns(mesh, (("y",),), 2, num_arrays=3).num_patterns == 3
