"""A bit of one device's copy flips without an error: named by step, array and slice, and never restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from local_jobs import (
    GLOBAL_BATCH,
    Outcome,
    Points,
    init_state,
    inject,
    make_spec,
    open_session,
    outcome,
    run,
    shardings,
    train_step,
)

from elastic.job import JobSpec
from elastic.records import CopiesCompared, CorruptionSuspected, LossDetected, of_kind

FLIP_AT = 5
MANTISSA_BIT = 0x20
WARN = {"on_corruption": "warn"}


def flipped(array: jax.Array, device_ids: tuple[int, ...]) -> jax.Array:
    """The same array with one bit of its first element flipped in the copies on these devices."""
    shards = []
    for shard in array.addressable_shards:
        value = np.array(shard.data)
        if shard.device.id in device_ids:
            value.reshape(-1).view(np.uint8)[2] ^= MANTISSA_BIT
        shards.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def run_flipping(
    spec: JobSpec,
    device_ids: tuple[int, ...],
    *,
    flip_at: int = FLIP_AT,
    steps: int = 12,
    faults: Mapping[tuple[int, int], tuple[Any, ...]] | None = None,
    look: Callable[[int, Any], None] = lambda step, state: None,
) -> Outcome:
    """A job in whose first world the weights change on these devices (two a slice) after `flip_at`."""
    with open_session(spec) as session:
        for world in session.worlds():
            with world:
                mesh = world.mesh({"data": -1, "model": 2})
                placed = shardings(mesh)
                state = world.restore(init_state, placed)
                look(world.newest_step, state)
                step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(placed, None))
                for step, batch in world.batches(Points(), global_batch=GLOBAL_BATCH, num_steps=steps):
                    state, metrics = step_fn(state, batch)
                    look(step, state)
                    if (world.generation, step) == (1, flip_at):
                        state = {**state, "w": flipped(state["w"], device_ids)}
                    if faults and (world.generation, step) in faults:
                        inject(*faults[world.generation, step])
                    world.commit(step, state, metrics)
    return outcome(spec)


def findings(result: Outcome) -> list[CorruptionSuspected]:
    return of_kind(result.records, CorruptionSuspected)


def test_undisturbed_job_compares_every_capture_and_audits_each_kth(tmp_path: Path, root: Path) -> None:
    result = run_flipping(make_spec(tmp_path, root, replicas=2, audit_every=4), ())
    snapshots = result.report.snapshots
    assert (snapshots.compared, snapshots.audits, snapshots.disagreements) == (12, 3, 0)
    assert result.report.invariants["copies_agree"] == "held"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_flipped_bit_is_noticed_at_its_step_and_an_audit_names_its_slice(
    tmp_path: Path, root: Path, victim: int
) -> None:
    result = run_flipping(
        make_spec(tmp_path, root, replicas=2, audit_every=0, **WARN), (2 * victim, 2 * victim + 1)
    )
    first, *_ = found = findings(result)
    assert (first.step, first.is_audit, first.boxes[0].path) == (FLIP_AT, False, "['w']")
    assert victim in first.suspects
    audits = [record for record in found if record.is_audit]
    assert [(record.step, record.suspects, record.is_majority) for record in audits] == [
        (FLIP_AT + 2, (victim,), True)
    ]
    assert {box.path for record in found for box in record.boxes} <= {"['w']", "['m']"}
    corruption = result.report.snapshots.corruptions[0]
    assert (corruption.first_step, corruption.path, corruption.suspects) == (FLIP_AT, "['w']", (victim,))
    assert result.report.invariants["copies_agree"] == "broken"
    assert [r.is_audit for r in of_kind(result.records, CopiesCompared)].count(True) == 1  # ordered, once


def test_flipped_copy_that_no_snapshot_takes_is_found_by_the_next_audit_with_its_device(
    tmp_path: Path, root: Path
) -> None:
    """Each slice has every box of "w" once here; with one replica no capture has two copies to compare."""
    result = run_flipping(make_spec(tmp_path, root, replicas=1, audit_every=4, **WARN), (4,))
    (finding, *_) = findings(result)
    assert (finding.step, finding.is_audit, finding.suspects) == (7, True, (2,))
    assert finding.boxes[0].devices == (4,)
    assert result.report.snapshots.compared == 0


def test_two_slices_that_differ_are_both_suspects(tmp_path: Path, root: Path) -> None:
    result = run_flipping(make_spec(tmp_path, root, num_slices=2, replicas=2, audit_every=4), (0, 1))
    assert all(not record.is_majority and record.suspects == (0, 1) for record in findings(result))
    assert any(record.is_audit for record in findings(result))


def test_restore_takes_the_majority_even_on_the_slice_whose_own_copy_is_wrong(
    tmp_path: Path, root: Path
) -> None:
    seen: dict[int, list[np.ndarray[Any, Any]]] = {}

    def look(step: int, state: Any) -> None:
        copies = [np.array(shard.data) for shard in state["w"].addressable_shards]
        seen.setdefault(step, []).append(np.concatenate(copies[:2], axis=1))
        if step == FLIP_AT and len(seen[step]) == 2:  # restored: all slices have the same
            for left, right in zip(copies[::2], copies[1::2], strict=True):
                seen[step].append(np.concatenate([left, right], axis=1))

    spec = make_spec(tmp_path, root, num_slices=4, replicas=4, **WARN)
    result = run_flipping(spec, (2, 3), faults={(1, FLIP_AT + 1): ("kill", 0)}, look=look)
    assert (result.worlds[-1].restored_step, result.worlds[-1].slices) == (FLIP_AT, (1, 2, 3))
    assert "['w'] of slice 1 refused: minority of 3 copies" in result.worlds[-1].explanation
    good, *restored = seen[FLIP_AT]
    assert len(restored) == 4
    for copy in restored:
        np.testing.assert_array_equal(copy, good)


def test_restore_prefers_an_older_step_on_which_two_copies_agree(tmp_path: Path, root: Path) -> None:
    spec = make_spec(tmp_path, root, replicas=2)
    result = run_flipping(spec, (2, 3), faults={(1, FLIP_AT + 1): ("kill", 0)}, flip_at=FLIP_AT)
    world = result.worlds[-1]
    # Slice 0 is lost: "w" of step 5 is left on slices 1 and 2, one of them wrong and nobody knows which.
    assert world.restored_step == FLIP_AT - 1
    assert f"step {FLIP_AT} cannot be trusted" in world.explanation
    assert result.report.steps.lost == 0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_slice_that_a_majority_names_is_thrown_out_and_what_it_touched_runs_again_without_it(
    tmp_path: Path, root: Path, victim: int
) -> None:
    spec = make_spec(tmp_path, root, replicas=3, rejoin_after_steps=3)
    result = run_flipping(spec, (2 * victim, 2 * victim + 1))
    (loss,) = of_kind(result.records, LossDetected)
    assert (loss.slice_index, loss.detector) == (victim, "checksum")
    assert loss.cause == f"its copy of ['w'] of step {FLIP_AT} differs from the majority's"
    smaller, whole = result.worlds[-2:]
    assert smaller.slices == tuple(index for index in range(3) if index != victim)
    assert smaller.restored_step == FLIP_AT - 1  # the newest at which all copies agreed
    assert f"step {FLIP_AT} cannot be trusted: copies differed from step {FLIP_AT} on" in smaller.explanation
    assert whole.slices == (0, 1, 2)
    assert set(result.report.invariants.values()) == {"held"}
    assert result.report.snapshots.disagreements == 1
    undisturbed = run(make_spec(tmp_path / "undisturbed", root))
    assert result.losses == pytest.approx(undisturbed.losses, rel=1e-5)


def test_two_slices_of_which_neither_can_be_named_go_on_and_the_report_says_so(
    tmp_path: Path, root: Path
) -> None:
    result = run_flipping(make_spec(tmp_path, root, num_slices=2, replicas=2), (0, 1))
    assert of_kind(result.records, LossDetected) == []
    assert result.report.steps.committed == 12
    assert result.report.invariants["copies_agree"] == "broken"
