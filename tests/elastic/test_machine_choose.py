"""Which snapshot a recovery goes back to: whole, newest, and of one lineage."""

from dataclasses import replace

import pytest
from model_state import summary_of

from elastic.choose import choose_restore, other_holders, plan_restore, plan_whole
from reshard.errors import MissingShardError
from reshard.ids import HostId

WORLD = (0, 1, 2)


def held(*found: tuple[int, int, int], replicas: int = 2) -> dict[HostId, list[object]]:
    """Snapshots as (host, step, generation)."""
    snapshots: dict[HostId, list[object]] = {}
    for host, step, generation in found:
        summary = summary_of(WORLD, replicas, host, step, generation)
        snapshots.setdefault(HostId(host), []).append(summary)
    return snapshots


def chosen(snapshots: dict[HostId, list[object]], restored: dict[int, int]) -> tuple[int, int] | None:
    choice, _ = choose_restore(snapshots, restored)  # type: ignore[arg-type]
    return None if choice is None else (choice.step, choice.generation)


def test_choose_takes_the_newest_step_that_all_boxes_are_there_of() -> None:
    snapshots = held((0, 4, 1), (1, 4, 1), (0, 5, 1))
    assert chosen(snapshots, {1: -1}) == (4, 1)


def test_choose_says_why_newer_steps_were_refused() -> None:
    _, why = choose_restore(held((0, 4, 1), (1, 4, 1), (0, 5, 1)), {1: -1})  # type: ignore[arg-type]
    assert why.startswith("step 4 is whole in the memory of 2 hosts; step 5 lacks boxes of 1 array")


def test_choose_never_puts_shards_of_two_generations_together() -> None:
    assert chosen(held((0, 5, 1), (1, 5, 2)), {1: -1, 2: 5}) is None


def test_choose_refuses_what_a_later_world_left_behind() -> None:
    snapshots = held((0, 6, 1), (1, 6, 1), (0, 5, 2), (1, 5, 2))
    assert chosen(snapshots, {1: -1}) == (6, 1)
    assert chosen(snapshots, {1: -1, 2: 5}) == (5, 2)


def test_choose_keeps_the_snapshot_a_later_world_was_restored_from() -> None:
    assert chosen(held((0, 5, 1), (1, 5, 1), (0, 5, 2)), {1: -1, 2: 5, 3: 5}) == (5, 1)


def test_choose_says_so_when_nobody_holds_anything() -> None:
    assert choose_restore({}, {}) == (None, "no host holds a complete snapshot")


def test_choose_goes_back_behind_the_step_at_which_copies_began_to_differ() -> None:
    snapshots = held((0, 4, 2), (1, 4, 2), (0, 5, 2), (1, 5, 2), (0, 6, 2), (1, 6, 2))
    choice, why = choose_restore(snapshots, {2: -1}, differed_since=(2, 5))  # type: ignore[arg-type]
    assert choice is not None
    assert choice.step == 4
    assert "step 5 cannot be trusted: copies differed from step 5 on" in why


def test_choose_takes_what_differed_where_nothing_older_is_whole() -> None:
    snapshots = held((0, 4, 2), (0, 5, 2), (1, 5, 2), (0, 6, 2), (1, 6, 2))
    choice, why = choose_restore(snapshots, {2: -1}, differed_since=(2, 5))  # type: ignore[arg-type]
    assert choice is not None
    assert choice.step == 6
    assert "nothing older is whole and agrees" in why


def test_choose_does_not_mistrust_other_generations() -> None:
    snapshots = held((0, 6, 3), (1, 6, 3))
    assert choose_restore(snapshots, {}, differed_since=(2, 5)) == choose_restore(snapshots, {})  # type: ignore[arg-type]


def test_plan_restore_moves_only_what_the_targets_lack() -> None:
    choice, _ = choose_restore(held((0, 4, 1), (1, 4, 1), (2, 4, 1)), {})  # type: ignore[arg-type]
    assert choice is not None
    target, plan = plan_restore(choice, (HostId(0), HostId(2)), devices_per_host=1)
    assert target.layout.mesh.axis_sizes == (2,)
    assert (target.slices, target.why) == ((0, 2), "")
    assert plan.bytes_moved == plan.bytes_lower_bound == 32


def test_plan_whole_brings_every_array_to_one_host() -> None:
    choice, _ = choose_restore(held((0, 4, 1), (1, 4, 1)), {})  # type: ignore[arg-type]
    assert choice is not None
    _, plan = plan_whole(choice.layout, choice.holdings, 4, HostId(2))
    assert {transfer.target for transfer in plan.transfers} == {HostId(2)}
    lacking = replace(choice, holdings=choice.holdings[:1])
    with pytest.raises(MissingShardError):
        plan_whole(lacking.layout, lacking.holdings, 4, HostId(2))


def test_other_holders_are_neither_source_nor_target_and_differ_by_source() -> None:
    snapshots = held(*((host, 4, 1) for host in WORLD), replicas=3)
    choice, _ = choose_restore(snapshots, {})  # type: ignore[arg-type]
    assert choice is not None
    _, plan = plan_whole(choice.layout, choice.holdings, 4, HostId(3))
    others = other_holders(plan.transfers, choice.holdings)
    assert len(others) == len(plan.transfers) > 0
    for transfer, found in zip(plan.transfers, others, strict=True):
        assert set(found) == set(WORLD) - {transfer.source.slice_index}
    (to_one, *_) = [replace(transfer, target=HostId(1), source=HostId(0)) for transfer in plan.transfers]
    assert other_holders([to_one], choice.holdings) == ((2,),)
    assert other_holders([to_one], choice.holdings[:1]) == ((),)
    (from_two, *_) = [replace(transfer, source=HostId(2)) for transfer in plan.transfers]
    assert other_holders([from_two], choice.holdings, most=1) == ((0,),)


def tampered(
    snapshots: dict[HostId, list[object]], slice_index: int, step: int, checksum: int = 1
) -> dict[HostId, list[object]]:
    """One slice's copies of a step have other bytes, and checksums that fit them."""

    def change(summary: object) -> object:
        if summary.step != step:  # type: ignore[attr-defined]
            return summary
        holdings = tuple(replace(h, checksum=checksum) for h in summary.holdings)  # type: ignore[attr-defined]
        return replace(summary, holdings=holdings)  # type: ignore[type-var]

    return {
        host: [change(summary) for summary in found] if host.slice_index == slice_index else found
        for host, found in snapshots.items()
    }


def test_choose_leaves_out_the_minority_of_three_copies():
    snapshots = tampered(held((0, 5, 1), (1, 5, 1), (2, 5, 1), replicas=3), 1, 5)
    choice, why = choose_restore(snapshots, {})  # type: ignore[arg-type]
    assert choice is not None
    assert {holding.host.slice_index for holding in choice.holdings} == {0, 2}
    assert {copy.host.slice_index for copy in choice.left_out} == {1}
    assert "minority of 3 copies" in why
    _, plan = plan_restore(choice, (HostId(0), HostId(1)), devices_per_host=1)
    moved_to_1 = [t for t in plan.transfers if t.target == HostId(1) and not t.is_local]
    assert sum(t.nbytes for t in moved_to_1) == 48  # all of its state comes from others


def test_choose_takes_an_older_step_that_agrees_when_two_copies_differ():
    snapshots = tampered(held((0, 4, 1), (1, 4, 1), (2, 4, 1), (0, 5, 1), (1, 5, 1), (2, 5, 1)), 1, 5)
    choice, why = choose_restore(snapshots, {})  # type: ignore[arg-type]
    assert choice is not None
    assert (choice.step, choice.left_out) == (4, ())
    assert "step 5 cannot be trusted: copies of" in why


def test_choose_takes_what_differs_when_nothing_else_is_left_and_says_so():
    snapshots = tampered(tampered(held((0, 4, 1), (1, 4, 1), (0, 5, 1), (1, 5, 1)), 1, 5), 1, 4)
    choice, why = choose_restore(snapshots, {})  # type: ignore[arg-type]
    assert choice is not None
    assert choice.step == 5
    assert why.endswith("nothing older is whole and agrees")
    by_box: dict[object, set[int]] = {}
    for holding in choice.holdings:
        by_box.setdefault((holding.path, holding.box), set()).add(holding.checksum)
    assert all(len(checksums) == 1 for checksums in by_box.values())  # every slice restores the same


def test_choose_believes_the_slice_that_an_audit_has_not_named():
    snapshots = tampered(held((0, 5, 1), (1, 5, 1), replicas=3), 1, 5)
    named = frozenset((1, path, 0) for path in ("bias", "moments", "weights"))
    choice, why = choose_restore(snapshots, {}, named)  # type: ignore[arg-type]
    assert choice is not None
    assert {holding.host.slice_index for holding in choice.holdings} == {1}
    assert "an audit found it wrong" in why
