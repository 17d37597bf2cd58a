"""Copies that differ: the machine writes it down, has the devices audited, and remembers whom to distrust."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from model_job import Job
from model_state import PATHS, layout_for

from elastic.copy_check import Convicted, CopyCheck
from elastic.events import AuditAfter, Captured, EndWorker, Event, LaidOut, Phase, StopRequested, Write
from elastic.machine import step
from elastic.records import CopiesCompared, CorruptionSuspected, LossDetected
from elastic.state import JobState
from elastic.turn import Clock
from reshard.copies import CopyIndex, pack_checksums

WORLD = (0, 1, 2)
LAYOUT = layout_for(WORLD)
INDEXES = {False: CopyIndex.of_captures(LAYOUT, 2), True: CopyIndex.of_devices(LAYOUT)}


def running(**config: Any) -> JobState:
    """A job of three slices with two replicas that trains, nothing compared yet."""
    found: list[JobState] = []
    job = Job(3, **{"on_corruption": "warn", **config})
    job.when_step(7, lambda: found.append(job.state))
    job.run()
    state = found[0]
    assert state.phase is Phase.RUNNING
    return after(replace(state, copies=CopyCheck()), laid_out(state))[0]


def laid_out(state: JobState) -> LaidOut:
    return LaidOut(member=0, generation=state.generation, layout=LAYOUT)


def after(state: JobState, *events: Event) -> tuple[JobState, list[Any]]:
    done: list[Any] = []
    for event in events:
        state, commands = step(state, event, Clock(mono_s=1.0, unix_s=1.0))
        done += commands
    return state, done


def told(
    state: JobState, number: int, *, bad: tuple[int, str] | None = None, is_audit: bool = False
) -> list[Captured]:
    """What all slices tell of a capture; on slice `bad[0]` array `bad[1]` differs."""
    index = INDEXES[is_audit]
    events = []
    for host in index.ids:
        paths = [index.shards[i][0] for i in index.ids[host]]
        values = [hash((number, path)) % 2**64 ^ (bad == (host.slice_index, path)) for path in paths]
        events.append(
            Captured(
                member=host.slice_index,
                generation=state.generation,
                step=number,
                checksums=pack_checksums(values),
                is_audit=is_audit,
            )
        )
    return events


def records(commands: list[Any], kind: type[Any]) -> list[Any]:
    return [c.record for c in commands if isinstance(c, Write) and isinstance(c.record, kind)]


def audits(commands: list[Any]) -> list[AuditAfter]:
    return [command for command in commands if isinstance(command, AuditAfter)]


def test_copies_that_agree_are_counted_and_order_nothing():
    state = running()
    state, commands = after(state, *told(state, 8), *told(state, 9), *told(state, 10))
    assert [r.num_captures for r in records(commands, CopiesCompared)] == [1]
    assert records(commands, CorruptionSuspected) == []
    assert audits(commands) == []
    _, commands = after(state, StopRequested(reason="Ctrl-C"))
    assert [r.num_captures for r in records(commands, CopiesCompared)] == [2]


def test_two_copies_that_differ_order_one_audit_at_one_step_for_all():
    state = running()
    state, commands = after(state, *told(state, 8, bad=(1, "weights")))
    (record,) = records(commands, CorruptionSuspected)
    assert (record.step, record.is_audit, record.is_majority) == (8, False, False)
    assert 1 in record.suspects
    assert len(record.suspects) == 2
    assert record.boxes[0].path == "weights"
    orders = audits(commands)
    assert [order.member for order in orders] == [0, 1, 2]
    assert {order.step for order in orders} == {8 + 2}
    state, commands = after(state, *told(state, 9, bad=(1, "weights")))
    assert audits(commands) == []


def test_audit_names_the_slice_and_the_captures_after_it_repeat_nothing():
    state = running()
    state, commands = after(state, *told(state, 8, bad=(1, "weights")))
    step_ordered = audits(commands)[0].step
    state, commands = after(state, *told(state, step_ordered, bad=(1, "weights"), is_audit=True))
    (record,) = records(commands, CorruptionSuspected)
    assert (record.suspects, record.is_majority, record.is_audit) == ((1,), True, True)
    assert [box.devices for box in record.boxes] == [(1,)]
    assert [r.is_audit for r in records(commands, CopiesCompared)] == [True]
    assert state.copies.named == {(state.generation, "weights", 1)}
    state, commands = after(state, *told(state, step_ordered + 1, bad=(1, "weights")))
    assert records(commands, CorruptionSuspected) == []
    assert audits(commands) == []
    state, commands = after(state, *told(state, step_ordered + 2, bad=(0, "bias")))
    assert [r.boxes[0].path for r in records(commands, CorruptionSuspected)] == ["bias"]


def test_captures_repeat_nothing_that_an_audit_could_not_decide_either():
    state = running()
    state, commands = after(state, *told(state, 8, bad=(1, "weights")))
    step_ordered = audits(commands)[0].step
    found = told(state, step_ordered, bad=(1, "weights"), is_audit=True)
    found[2] = replace(found[2], checksums=pack_checksums([9, 9, 9]))  # three slices, three different copies
    state, commands = after(state, *found)
    (record,) = records(commands, CorruptionSuspected)
    assert (record.is_majority, record.suspects) == (True, (2,))  # of the other arrays
    assert [box.suspects for box in record.boxes if not box.is_majority] == [(0, 1, 2)]
    assert (state.generation, "weights", 1) not in state.copies.named
    _, commands = after(state, *told(state, step_ordered + 1, bad=(1, "weights")))
    assert records(commands, CorruptionSuspected) == []
    assert audits(commands) == []


def test_audit_that_finds_nothing_is_ordered_again_when_copies_differ_again():
    state = running()
    state, commands = after(state, *told(state, 8, bad=(1, "weights")))
    step_ordered = audits(commands)[0].step
    state, commands = after(state, *told(state, step_ordered, is_audit=True))
    assert records(commands, CorruptionSuspected) == []
    _, commands = after(state, *told(state, step_ordered + 1, bad=(1, "weights")))
    assert len(audits(commands)) == 3


def test_audit_of_an_earlier_step_does_not_answer_the_order():
    state = running()
    state, commands = after(state, *told(state, 8, bad=(1, "weights")))
    assert audits(commands)[0].step > 8
    state, _ = after(state, *told(state, 8, is_audit=True))
    assert state.copies.audit_step == audits(commands)[0].step


def test_checksums_of_another_generation_change_nothing():
    state = running()
    old = [replace(event, generation=state.generation - 1) for event in told(state, 8, bad=(1, "bias"))]
    assert after(state, *old) == (state, [])


@pytest.mark.parametrize("phase", [Phase.SUSPECT, Phase.FENCING, Phase.REBUILDING])
def test_finding_in_a_phase_that_does_not_train_orders_its_audit_later(phase: Phase):
    state = running()
    paused, commands = after(replace(state, phase=phase), *told(state, 8, bad=(1, "weights")))
    assert len(records(commands, CorruptionSuspected)) == 1
    assert audits(commands) == []
    assert paused.copies.wants_audit
    _, commands = after(replace(paused, phase=Phase.RUNNING), told(state, 9)[0])
    assert len(audits(commands)) == 3


def test_layout_told_again_changes_nothing_and_that_of_a_new_world_starts_afresh():
    state = running()
    state, _ = after(state, told(state, 8)[0])
    assert after(state, laid_out(state)) == (state, [])
    newer = replace(state, generation=state.generation + 1)
    fresh, _ = after(newer, laid_out(newer))
    assert (fresh.copies.generation, fresh.copies.tables) == (newer.generation, ())


def test_slice_that_a_majority_names_is_thrown_out_and_its_steps_are_not_trusted():
    state = running(on_corruption="throw-out")
    state, _ = after(state, *told(state, 8))
    state, commands = after(state, *told(state, 9, bad=(1, "weights"), is_audit=True))
    (loss,) = records(commands, LossDetected)
    assert (loss.slice_index, loss.detector) == (1, "checksum")
    assert loss.cause == "its copy of weights of step 9 differs from the majority's"
    assert state.phase is Phase.FENCING
    assert [command.member for command in commands if isinstance(command, EndWorker)] == [1]
    assert state.copies.differed_since == (state.generation - 1, 9)
    later = replace(state, generation=state.generation + 1)
    later, _ = after(later, laid_out(later))
    assert (later.copies.convicted, later.copies.differed_since) == ((), state.copies.differed_since)


def test_slices_that_only_differ_are_not_thrown_out():
    state = running(on_corruption="throw-out")
    state, commands = after(state, *told(state, 8, bad=(1, "weights")))
    assert state.phase is Phase.RUNNING
    assert len(audits(commands)) == 3


def test_a_majority_of_all_slices_against_each_other_throws_nobody_out():
    state = running(on_corruption="throw-out")
    everybody = tuple(Convicted(slice_index=index, path="weights", step=8) for index in WORLD)
    state = replace(state, copies=replace(state.copies, convicted=everybody))
    state, commands = after(state, told(state, 9)[0])
    assert state.phase is Phase.RUNNING
    assert records(commands, LossDetected) == []


def test_paths_of_the_model_are_those_compared():
    assert {path for path, _ in INDEXES[True].shards} == set(PATHS)
