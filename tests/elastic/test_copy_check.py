"""What the state machine keeps of the checksums it hears, and when it compares them."""

from __future__ import annotations

from dataclasses import replace

from elastic.copy_check import MAX_NAMED, MAX_STEPS, CopyCheck, disagreement_record, is_known, named_by
from elastic.events import Captured
from reshard.copies import CopyIndex, pack_checksums
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout

WORLD = (0, 1, 2)
LAYOUT = Layout(
    mesh=MeshLayout(axis_names=("data",), axis_sizes=(3,), hosts=tuple(HostId(index) for index in WORLD)),
    arrays=tuple(ArrayLayout(path=f"w{i:02}", shape=(4,), dtype="float32", itemsize=4) for i in range(12)),
    elastic_axis="data",
)
CHECK = CopyCheck().entered(1, LAYOUT)


def told(member: int, step: int, *, flip: int | None = None, is_audit: bool = False) -> Captured:
    """One slice's checksums of all arrays (three replicas); `flip` falsifies that of one (-1: of all)."""
    values = [1000 * step + array for array in range(12)]
    for array in range(12) if flip == -1 else () if flip is None else (flip,):
        values[array] ^= 1 << 63
    return Captured(
        member=member,
        generation=1,
        step=step,
        checksums=pack_checksums(values),
        is_audit=is_audit,
    )


def take(check: CopyCheck, *events: Captured):
    done = []
    for event in events:
        check, found = check.taken_in(event, WORLD, 3)
        done += found
    return check, done


def test_check_compares_when_every_slice_has_told():
    check, done = take(CHECK, told(0, 5), told(1, 5))
    assert done == []
    check, (comparison,) = take(check, told(2, 5))
    assert (comparison.step, comparison.slices, comparison.disagreements) == (5, WORLD, ())
    assert check.tables == ()


def test_check_names_array_and_slice():
    _, (comparison,) = take(CHECK, told(0, 5), told(2, 5), told(1, 5, flip=7))
    (found,) = comparison.disagreements
    assert (found.path, found.suspects, found.slices) == ("w07", (1,), WORLD)
    assert named_by(comparison, 1) == {(1, "w07", 1)}


def test_check_compares_audits_apart_from_captures():
    events = [told(index, 5, is_audit=is_audit) for index in WORLD for is_audit in (False, True)]
    check, done = take(CHECK, *events)
    assert [comparison.is_audit for comparison in done] == [False, True]
    assert check.newest_done == (5, 5)


def test_check_keeps_the_tables_of_a_bounded_number_of_captures_and_compares_those_that_it_drops():
    check = CHECK
    done = []
    for step in range(40):
        check, found = take(check, told(0, step), told(1, step, flip=2 if step == 3 else None))
        done += found
        assert len(check.tables) <= MAX_STEPS
    assert [comparison.step for comparison in done] == list(range(40 - MAX_STEPS))
    assert {comparison.slices for comparison in done} == {(0, 1)}
    (found,) = done[3].disagreements
    assert (found.path, found.good, found.suspects) == ("w02", None, (0, 1))


def test_check_forgets_what_one_slice_alone_has_told():
    check, done = take(CHECK, *(told(0, step) for step in range(40)))
    assert done == []
    assert [table.step for table in check.tables] == list(range(40 - MAX_STEPS, 40))


def test_check_ignores_what_comes_after_the_comparison():
    check, _ = take(CHECK, *(told(index, 5) for index in WORLD))
    assert take(check, told(1, 5, flip=0), told(1, 4)) == (check, [])


def test_check_takes_what_a_slice_tells_again_in_place_of_the_first():
    check, _ = take(CHECK, told(0, 5, flip=1), told(0, 5), told(1, 5))
    _, (comparison,) = take(check, told(2, 5))
    assert comparison.disagreements == ()


def test_check_leaves_out_a_table_that_does_not_fit():
    bad = Captured(member=1, generation=1, step=5, checksums=b"\0" * 8)
    _, (comparison,) = take(CHECK, told(0, 5), bad, told(2, 5, flip=3))
    assert comparison.slices == (0, 2)
    assert [found.path for found in comparison.disagreements] == ["w03"]


def test_check_keeps_what_comes_before_the_layout_until_it_is_there():
    check, done = take(CopyCheck(), told(1, 5), told(2, 5, flip=3), told(0, 5))
    assert done == []
    _, (first, second) = take(check.entered(1, LAYOUT), *(told(index, 6) for index in WORLD))
    assert (first.step, [found.path for found in first.disagreements], second.step) == (5, ["w03"], 6)


def test_check_without_a_layout_keeps_a_bounded_number_of_tables():
    check, done = take(CopyCheck(), *(told(0, step) for step in range(40)))
    assert (len(check.tables), done) == (MAX_STEPS, [])


def test_check_never_compares_checksums_with_the_layout_of_an_older_world():
    check, done = take(CHECK, *(replace(told(index, 5), generation=2) for index in WORLD))
    assert (check.generation, check.layout, done) == (2, None, [])


def test_check_compares_an_audit_that_a_slice_has_missed_after_a_few_more_captures():
    check, done = take(CHECK, told(0, 5, is_audit=True), told(2, 5, is_audit=True, flip=1))
    for step in range(6, 6 + MAX_STEPS + 1):
        assert done == []
        check, found = take(check, *(told(index, step) for index in WORLD))
        done += [comparison for comparison in found if comparison.is_audit]
    ((audit,), tables) = (done, check.tables)
    assert (audit.slices, [found.path for found in audit.disagreements], tables) == ((0, 2), ["w01"], ())


def test_check_of_a_new_world_starts_afresh_but_remembers_whom_it_named():
    check, _ = take(CHECK, told(0, 5))
    named = frozenset({(1, "w00", 2)})
    fresh = CopyCheck(generation=1, layout=LAYOUT, tables=check.tables, named=named).entered(2, LAYOUT)
    assert (fresh.generation, fresh.tables, fresh.named) == (2, (), named)


def test_check_works_out_its_index_once_a_world():
    check, _ = take(CHECK, *(told(index, 5) for index in WORLD))
    again, _ = take(check, *(told(index, 6) for index in WORLD))
    assert again.stored_index is check.stored_index
    assert isinstance(check.stored_index, CopyIndex)
    assert check.device_index is None


def test_record_names_a_few_arrays_and_counts_all_of_them():
    _, (comparison,) = take(CHECK, told(0, 5), told(1, 5), told(2, 5, flip=-1))
    record = disagreement_record(comparison, 1, 9.0)
    assert (record.num_arrays, record.num_boxes, len(record.boxes)) == (12, 12, MAX_NAMED)
    assert (record.step, record.slices, record.suspects, record.is_majority) == (5, WORLD, (2,), True)
    assert record.boxes[0].path == "w00"
    assert record.boxes[0].suspects == (2,)


def test_record_without_a_majority_suspects_all_that_differ():
    check, _ = take(CHECK, told(0, 0), told(1, 0, flip=4))
    _, (comparison, *_) = take(check, *(told(0, step) for step in range(1, MAX_STEPS + 1)))
    record = disagreement_record(comparison, 1, 9.0)
    assert (record.suspects, record.is_majority, record.slices) == ((0, 1), False, (0, 1))


def test_capture_tells_nothing_new_of_arrays_that_an_audit_has_found():
    _, (comparison,) = take(CHECK, told(0, 5), told(1, 5), told(2, 5, flip=4))
    assert not is_known(comparison, CHECK)
    assert is_known(comparison, CopyCheck(is_audited=True, audited_paths=frozenset({"w04", "w05"})))
    assert not is_known(comparison, CopyCheck(is_audited=True, audited_paths=frozenset({"w05"})))
    assert not is_known(comparison, CopyCheck(is_audited=False, audited_paths=frozenset({"w04"})))


def test_comparison_counts_boxes_with_more_than_one_copy():
    _, (comparison,) = take(CHECK, *(told(index, 5) for index in WORLD))
    assert comparison.num_boxes == 12
    _, (comparison,) = CHECK.taken_in(told(0, 6), (0,), 3)
    assert (comparison.num_boxes, comparison.slices) == (0, (0,))


def test_check_forgets_after_a_while_whom_it_named_in_old_generations():
    check = CopyCheck(named=frozenset({(1, "w00", 2), (30, "w00", 1)})).entered(40, LAYOUT)
    assert check.named == {(30, "w00", 1)}
