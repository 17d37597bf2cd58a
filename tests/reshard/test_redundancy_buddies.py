from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.redundancy_buddies import keep

layouts = layout_pairs().map(lambda pair: pair[0])


def split_layout(hosts_per_slice, lengths):
    """Arrays split evenly over all hosts of slices of these sizes."""
    hosts = tuple(HostId(s, h) for s, size in enumerate(hosts_per_slice) for h in range(size))
    return Layout(
        mesh=MeshLayout(axis_names=("x",), axis_sizes=(len(hosts),), hosts=hosts),
        arrays=tuple(
            ArrayLayout(path=f"w{i}", shape=(len(hosts) * n,), dtype="int8", itemsize=1, spec=(("x",),))
            for i, n in enumerate(lengths)
        ),
    )


def loads_of(layout, kept_groups):
    loads = np.zeros(len(layout.mesh.distinct_hosts()), np.int64)
    for kept in kept_groups:
        np.add.at(loads, kept.host, (kept.stop - kept.first) * kept.group.nbytes[kept.box])
    return loads


@PROPERTY
@given(layouts, st.integers(1, 4))
def test_every_copy_that_is_wanted_is_kept_once(layout, replicas):
    num_slices = len({host.slice_index for host in layout.mesh.hosts})
    copies = Counter()
    groups = {}
    for kept in keep(layout, replicas):
        for path in kept.group.paths[kept.first : kept.stop]:
            copies.update((path, box) for box in kept.box.tolist())
            groups[path] = kept.group
    for path, group in groups.items():
        for box, held_by in enumerate(group.patterns.num_slices.tolist()):
            assert copies[path, box] == max(0, min(replicas, num_slices) - held_by)


def test_slices_alike_keep_all_arrays_in_the_same_columns():
    groups = keep(split_layout([4, 4, 4], [7, 5, 3, 3]), 2)
    assert sum(len(kept.group.paths) for kept in groups) == 4
    assert len({(id(kept.host), id(kept.box)) for kept in groups}) == 1
    assert dict(zip(groups[0].box.tolist(), groups[0].host.tolist(), strict=True)) == {
        box: (box + 4) % 12 for box in range(12)
    }


@PROPERTY
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=6),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_slices_of_different_sizes_do_not_load_the_small_ones_with_all_of_the_large(sizes, lengths):
    layout = split_layout(sizes, lengths)
    loads = loads_of(layout, keep(layout, 2))
    # What a slice holds is on the hosts of the others: one of them has this share at least.
    least_possible = max(max(1, size / (sum(sizes) - size)) for size in sizes) * sum(lengths)
    assert loads.sum() == sum(sizes) * sum(lengths)
    assert loads.max() <= 1.5 * least_possible + max(lengths)


def test_where_all_are_full_the_least_full_keep_more():
    """Slice 0 holds four of five parts: the one other host keeps these, however much that is."""
    layout = split_layout([4, 1], [6, 6])
    assert loads_of(layout, keep(layout, 2)).tolist() == [12, 0, 0, 0, 48]
