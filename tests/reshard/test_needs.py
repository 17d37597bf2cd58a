import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, boxes, losses, mask_of, meshes, specs

from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.needs import Needs
from reshard.stock import Stock


def lacking_bytes(layout: Layout, array: ArrayLayout, holdings: list[Holding]) -> list[int]:
    """The model: elements of each host's boxes that are in none of its holdings, one by one."""
    found = []
    for host, wanted in layout.boxes_by_host(array).items():
        held = [h.box for h in holdings if (h.host, h.path) == (host, array.path)]
        is_held = mask_of(array.shape, held)
        found.append(sum(int((mask_of(array.shape, [box]) & ~is_held).sum()) for box in wanted))
    return [count * array.itemsize for count in found]


@PROPERTY
@given(losses())
def test_needs_are_the_bytes_that_each_host_has_not(loss):
    layout, holdings = loss
    needs = Needs(Stock.of_holdings(holdings, 7), {array.path: [array.path] for array in layout.arrays})
    for array in layout.arrays:
        found = needs.lacking(array.path, layout.mesh, array, 1, needs.targets(layout.mesh))
        assert found.tolist() == lacking_bytes(layout, array, holdings)


@PROPERTY
@given(st.data(), meshes())
def test_needs_count_boxes_that_overlap_on_a_host_once(data, mesh):
    spec = data.draw(specs(mesh.axis_names, 2))
    array = ArrayLayout(path="w", shape=(5, 5), dtype="x", itemsize=2, spec=spec, padded=True)
    hosts = st.sampled_from([*mesh.distinct_hosts(), HostId(9)])
    held = st.builds(
        Holding,
        host=hosts,
        box=boxes(rank=2),
        tier=st.sampled_from(["shm", "peer"]),
        **{name: st.just(value) for name, value in (("step", 3), ("path", "w"), ("checksum", 0))},
    )
    holdings = data.draw(st.lists(held, max_size=8))
    cut = data.draw(st.integers(0, len(holdings)))
    first, second = (Stock.of_holdings(part, 3) for part in (holdings[:cut], holdings[cut:]))
    needs = Needs(first.merged(second), {"one": ["w"]})
    found = needs.lacking("one", mesh, array, 1, needs.targets(mesh))
    assert found.tolist() == lacking_bytes(Layout(mesh=mesh, arrays=(array,)), array, holdings)


@PROPERTY
@given(losses())
def test_needs_count_what_slices_hold_with_every_copy(loss):
    layout, holdings = loss
    needs = Needs(Stock.of_holdings(holdings, 7), {"all": [array.path for array in layout.arrays[:1]]})
    expected: dict[int, int] = {}
    for holding in holdings:
        if holding.path == layout.arrays[0].path:
            count = int(np.prod([stop - start for start, stop in holding.box]))
            expected[holding.host.slice_index] = expected.get(holding.host.slice_index, 0) + count
    assert needs.elements_by_slice("all") == {index: count for index, count in expected.items() if count}


def test_needs_of_arrays_that_nobody_holds_are_all_of_them():
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=(HostId(0), HostId(1)))
    array = ArrayLayout(path="w", shape=(4,), dtype="x", itemsize=2, spec=(("data",),))
    needs = Needs(Stock(hosts=(), groups=()), {"all": ["w", "v", "u"]})
    assert needs.lacking("all", mesh, array, 3, needs.targets(mesh)).tolist() == [12, 12]
    assert needs.elements_by_slice("all") == {}
