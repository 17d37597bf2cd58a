"""Which layout a script is expected to ask for, on the slices that are there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.expected import Expected, expect_layout, first_lacking
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout, Spec
from reshard.stock import Stock

ROWS: Spec = (("data",), ())


def layout_on(slices: tuple[int, ...], specs: dict[str, Spec], *, inner: int = 1) -> Layout:
    """Arrays of 8 × 3 on one host of `inner` devices a slice."""
    hosts = tuple(HostId(index) for index in slices for _ in range(inner))
    mesh = MeshLayout(axis_names=("data", "model"), axis_sizes=(len(slices), inner), hosts=hosts)
    arrays = tuple(
        ArrayLayout(path=path, shape=(8, 3), dtype="float32", itemsize=4, spec=spec)
        for path, spec in specs.items()
    )
    return Layout(mesh=mesh, arrays=arrays, elastic_axis="data")


FOUR = layout_on((0, 1, 2, 3), {"m": ROWS, "w": ((), ())})


def expect(snapshot: Layout, slices: tuple[int, ...], told: dict[int, Layout] | None = None) -> Expected:
    hosts = tuple(map(HostId, slices))
    inner = snapshot.mesh.num_devices // len(snapshot.mesh.distinct_hosts())
    held = Stock.of_layout(snapshot)
    return expect_layout(snapshot, hosts, inner, told=told or {}, held=held)


def spec_of(found: Expected, path: str) -> Spec:
    return next(array.spec for array in found.layout.arrays if array.path == path)


def test_expected_layout_is_the_snapshots_where_every_dim_divides() -> None:
    found = expect(FOUR, (0, 2))
    assert (found.slices, found.why) == ((0, 2), "")
    assert found.layout == FOUR.resized((HostId(0), HostId(2)), 1)


def test_expected_layout_replicates_what_does_not_divide_and_says_so() -> None:
    found = expect(FOUR, (0, 2, 3))
    assert spec_of(found, "m") == ((), ())
    assert found.why == (
        "data=3 on 3 slices, 1 array replicated; dim 0 (8) of m does not divide into 3: "
        "replicated over the axis"
    )


def test_expected_layout_partitions_again_what_an_earlier_world_had_to_replicate() -> None:
    three = layout_on((0, 2, 3), {"m": ((), ()), "w": ((), ())})
    assert spec_of(expect(three, (0, 1, 2, 3)), "m") == ((), ())  # nothing tells that it was otherwise
    found = expect(three, (0, 1, 2, 3), {4: FOUR, 3: three})
    assert (spec_of(found, "m"), found.why) == (ROWS, "")
    assert spec_of(expect(three, (0, 1), {4: FOUR, 3: three}), "m") == ROWS


def test_expected_layout_is_what_the_script_asked_for_on_as_many_slices() -> None:
    columns = layout_on((0, 1, 2), {"m": ((), ("data",)), "w": ((), ())})
    found = expect(FOUR, (1, 2, 3), {3: columns})
    assert spec_of(found, "m") == ((), ("data",))
    assert found.layout.mesh.distinct_hosts() == (HostId(1), HostId(2), HostId(3))
    assert found.why == "the state is laid out as the script did it on 3 slices before"
    by_the_rule = layout_on((0, 1, 2), {"m": ((), ()), "w": ((), ())})
    assert expect(FOUR, (1, 2, 3), {3: by_the_rule}) == expect(FOUR, (1, 2, 3))


def test_expected_layout_does_not_heed_what_was_told_of_another_state() -> None:
    other = layout_on((0, 1, 2), {"other": ROWS[::-1]})
    assert expect(FOUR, (1, 2, 3), {3: other}) == expect(FOUR, (1, 2, 3))


def experts(slices: tuple[int, ...]) -> Layout:
    """Four places of experts on slices of two devices: they take two slices, or four."""
    hosts = tuple(HostId(index) for index in slices for _ in range(2))
    mesh = MeshLayout(axis_names=("data", "expert"), axis_sizes=(len(slices) // 2, 4), hosts=hosts)
    array = ArrayLayout(path="e", shape=(8, 3), dtype="float32", itemsize=4, spec=(("expert",), ()))
    return Layout(mesh=mesh, arrays=(array,), elastic_axis="data")


def test_expected_layout_leaves_slices_idle_where_the_other_axes_do_not_fit_all() -> None:
    found = expect(experts((0, 1, 2, 3)), (0, 2, 3))
    assert found.slices == (2, 3)  # a whole group of the data axis; of slices 0 and 1 one is left
    assert found.layout.mesh.axis_sizes == (1, 4)
    assert found.why == "data=1 on 2 slices, slice 0 idle"
    told = {4: experts((0, 1, 2, 3)), 2: experts((0, 1))}
    assert expect(experts((0, 1, 2, 3)), (0, 2, 3), told) == found


def test_expected_layout_takes_all_slices_where_the_script_has_shown_how() -> None:
    hosts = tuple(HostId(index) for index in (0, 1, 2) for _ in range(2))
    mesh = MeshLayout(axis_names=("data", "expert"), axis_sizes=(3, 2), hosts=hosts)
    three = Layout(mesh=mesh, arrays=experts((0, 1)).arrays, elastic_axis="data")
    found = expect(experts((0, 1, 2, 3)), (0, 2, 3), {3: three})
    assert (found.slices, found.layout.mesh.axis_sizes) == ((0, 2, 3), (3, 2))


def test_expected_layout_is_none_where_no_number_of_slices_fits() -> None:
    with pytest.raises(UsageError, match="no layout for 1 slice: axis 'data' on 1 slice: 2 devices are not"):
        expect(experts((0, 1, 2, 3)), (3,))


class Shelf:
    """Boxes of one array."""

    def __init__(self, *boxes: tuple[tuple[int, int], ...]) -> None:
        self._boxes = boxes

    def boxes(self, path: str) -> tuple[tuple[tuple[int, int], ...], ...]:
        return self._boxes if path == "m" else (((0, 8), (0, 3)),)


@given(st.sets(st.integers(0, 7)))
def test_first_lacking_is_the_first_row_of_the_host_that_is_not_there(rows: set[int]) -> None:
    stored = Shelf(*(((row, row + 1), (0, 3)) for row in sorted(rows)))
    needed = {2, 3, 6, 7}  # of slices 1 and 3
    found = first_lacking(FOUR, [HostId(1), HostId(3)], stored)
    missing = sorted(needed - rows)
    assert (found is None) == (not missing)
    if found is not None:
        path, ((start, _), columns) = found
        assert (path, start, columns) == ("m", missing[0], (0, 3))


def test_nothing_lacks_where_shards_are_cut_in_another_way() -> None:
    assert first_lacking(FOUR, [HostId(0)], Shelf(((0, 1), (0, 3)), ((1, 8), (0, 3)))) is None
