"""A job under the local adapter loses virtual slices and goes on: nothing lost, nothing left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from local_jobs import (
    Outcome,
    faults_at,
    make_spec,
    open_session,
    outcome,
    run,
    train,
    wait_until_persisted,
)

from elastic.cadence import Cadence, EverySeconds, EverySteps, StallBudget
from elastic.job import PersistSpec
from elastic.ports import JobOver
from elastic.records import LossDetected, RunEnded, StepCommitted, of_kind


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, float]]:
    """The losses of the same job without a fault."""
    with tempfile.TemporaryDirectory(prefix="elastic-slices-test-", dir="/dev/shm") as root:
        yield run(make_spec(tmp_path_factory.mktemp("undisturbed"), Path(root))).losses


def assert_nothing_lost(result: Outcome, steps: int = 12) -> None:
    report = result.report
    assert report.run.outcome == "completed", report.run.error
    assert (report.steps.committed, report.steps.lost, report.steps.repeated) == (steps, 0, 0)
    assert (report.samples.consumed, report.samples.lost, report.samples.repeated) == (12 * steps, 0, 0)
    assert set(report.invariants.values()) == {"held"}
    assert report.final.state_digest
    assert report.run.simulated_faults


def assert_same_losses(result: Outcome, undisturbed: dict[int, float], fault_step: int) -> None:
    for step, loss in undisturbed.items():
        if step < fault_step:
            assert result.losses[step] == loss
        else:
            assert result.losses[step] == pytest.approx(loss, rel=1e-3)


def test_undisturbed_job_commits_each_step_once_in_one_world(tmp_path: Path, root: Path) -> None:
    result = run(make_spec(tmp_path, root))
    assert_nothing_lost(result)
    assert [world.slices for world in result.worlds] == [(0, 1, 2)]
    assert result.attempts == [(1, step) for step in range(12)]
    assert not list(root.iterdir())
    assert (tmp_path / "report.json").is_file()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_kill_of_any_slice_goes_on_with_the_others(
    tmp_path: Path, root: Path, undisturbed: dict[int, float], lost: int
) -> None:
    result = run(make_spec(tmp_path, root), faults={(1, 5): ("kill", lost)})
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 5)
    (recovery,) = result.report.recoveries
    assert recovery.lost_slices == (lost,)
    assert recovery.slices_after == tuple(index for index in range(3) if index != lost)
    assert (recovery.mode, recovery.restored_step, recovery.resumed_step) == ("in-place", 4, 5)
    assert recovery.bytes_moved == recovery.bytes_lower_bound == 0
    assert recovery.mttr_s is not None
    assert recovery.mttr_s > 0


def test_stopped_slice_is_given_up_after_its_heartbeat_bound(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    result = run(make_spec(tmp_path, root), faults={(1, 5): ("stop", 1)})
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 5)
    (loss,) = of_kind(result.records, LossDetected)
    assert loss.detector == "worker-heartbeat"
    assert 0.15 <= result.report.recoveries[0].mttd_s < 1.0


def test_told_slice_leaves_at_a_boundary_without_replay(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    result = run(make_spec(tmp_path, root), faults={(1, 5): ("term", 2)})
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 5)
    assert [step for _, step in result.attempts] == list(range(12))
    assert result.report.steps.replayed == 0
    assert result.report.recoveries[0].slices_after == (0, 1)


def test_lost_host_is_a_loss_like_any_other(tmp_path: Path, root: Path) -> None:
    result = run(make_spec(tmp_path, root), faults={(1, 5): ("host", 0)})
    assert_nothing_lost(result)
    assert "host was lost" in result.report.recoveries[0].cause


@pytest.mark.parametrize("faults", [{(1, 3): ("kill", 0), (2, 7): ("kill", 2)}, {(1, 3): ("kill", 0, 2)}])
def test_two_lost_slices_leave_the_third(
    tmp_path: Path, root: Path, undisturbed: dict[int, float], faults: dict[tuple[int, int], tuple[str, ...]]
) -> None:
    result = run(make_spec(tmp_path, root), faults=faults)
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 3)
    assert result.worlds[-1].slices == (1,)


def test_kill_during_replay_goes_back_once_more(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    spec = make_spec(tmp_path, root, cadence=EverySteps(steps=4))
    result = run(spec, faults={(1, 7): ("kill", 0), (2, 5): ("kill", 1)})
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 4)
    assert [world.restored_step for world in result.worlds] == [None, 3, 3]
    assert result.report.steps.replayed == 3


def test_kill_during_the_first_step_begins_again_without_the_slice(tmp_path: Path, root: Path) -> None:
    result = run(make_spec(tmp_path, root), faults={(1, 0): ("kill", 1)})
    assert_nothing_lost(result)
    assert [world.restored_step for world in result.worlds] == [None, None]


def test_replacement_joins_at_a_boundary_and_takes_its_shards_from_peers(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    spec = make_spec(tmp_path, root, rejoin_after_steps=2)
    result = run(spec, faults={(1, 3): ("kill", 1)})
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 3)
    joined = result.report.recoveries[1]
    assert (joined.mode, joined.joined_slices, joined.slices_after) == ("scale-up", (1,), (0, 1, 2))
    assert joined.bytes_moved == joined.bytes_lower_bound == joined.source_tiers["peer"] > 0
    assert [step for _, step in result.attempts] == [*range(4), *range(3, 12)]


def test_stop_of_all_slices_goes_on_from_their_memory(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    spec = make_spec(tmp_path, root, rejoin_after_steps=0)
    result = run(spec, faults={(1, 5): ("stop", 0, 1, 2)})
    assert_nothing_lost(result)
    assert result.losses == undisturbed


@pytest.mark.parametrize("lost", [(0,), (1,), (2,)])
def test_state_that_one_slice_has_survives_it_in_the_memory_of_a_buddy(
    tmp_path: Path, root: Path, undisturbed: dict[int, float], lost: tuple[int, ...]
) -> None:
    result = run(make_spec(tmp_path, root, replicas=2), faults={(1, 6): ("kill", *lost)}, spread=True)
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 0)
    (recovery,) = result.report.recoveries
    assert recovery.lost_slices == lost
    assert recovery.source_tiers["peer"] == recovery.bytes_moved == recovery.bytes_lower_bound > 0


@pytest.mark.parametrize("lost", [(0, 1), (0, 2), (1, 2)])
def test_loss_of_all_but_one_of_three_copies_is_survived(
    tmp_path: Path, root: Path, undisturbed: dict[int, float], lost: tuple[int, ...]
) -> None:
    result = run(make_spec(tmp_path, root, replicas=3), faults={(1, 6): ("kill", *lost)}, spread=True)
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 0)


def test_slices_that_come_back_get_copies_again(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    spec = make_spec(tmp_path, root, replicas=2, rejoin_after_steps=2)
    result = run(spec, faults={(1, 3): ("kill", 1), (3, 9): ("kill", 2)}, spread=True)
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 0)
    assert [recovery.lost_slices for recovery in result.report.recoveries][::2] == [(1,), (2,)]


def test_loss_of_more_than_the_copies_goes_on_from_the_persistent_tier(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    persist = PersistSpec(directory=tmp_path / "tier", every_steps=4)
    spec = make_spec(tmp_path / "run", root, replicas=2, persists=True, rejoin_after_steps=0)
    held = wait_until_persisted(step=3)
    result = run(replace(spec, persist=persist), faults={(1, 6): ("kill", 0, 1)}, spread=True, hook=held)
    report = result.report
    assert report.run.outcome == "completed", report.run.error
    assert (report.steps.committed, report.steps.lost) == (12, 0)
    assert_same_losses(result, undisturbed, 0)
    recovery = report.recoveries[0]
    assert recovery.restored_step == 3
    assert recovery.source_tiers["persistent"] > 0
    assert "steps 4 to 5 were lost from memory" in recovery.explanation
    assert report.invariants["restored_equals_captured"] == "held"
    assert (report.snapshots.persisted_step, report.snapshots.persist_failed) == (11, 0)


def test_new_job_goes_on_where_another_left_the_persistent_tier_with_fewer_slices(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    persist = PersistSpec(directory=tmp_path / "tier", every_steps=100)
    first = run(replace(make_spec(tmp_path / "one", root, persists=True), persist=persist), steps=5)
    assert first.report.snapshots.persisted_step == 4
    spec = make_spec(tmp_path / "two", root, num_slices=2, replicas=2, persists=True)
    second = run(replace(spec, persist=replace(persist, epoch=2)))
    assert sorted(second.losses) == list(range(5, 12))
    assert_same_losses(second, {step: undisturbed[step] for step in range(5, 12)}, 0)
    steps = second.report.steps
    assert (steps.before, steps.committed, steps.lost) == (5, 7, 0)


def test_full_persistent_tier_is_told_and_training_goes_on(
    tmp_path: Path, root: Path, undisturbed: dict[int, float]
) -> None:
    (tmp_path / "tier").write_text("a file, where the directory should be")
    persist = PersistSpec(directory=tmp_path / "tier", every_steps=4)
    result = run(replace(make_spec(tmp_path / "run", root, persists=True), persist=persist))
    assert result.report.run.outcome == "completed"
    assert result.losses == undisturbed
    assert result.report.snapshots.persisted == 0
    assert result.report.snapshots.persist_failed >= 1


def test_state_that_only_the_lost_slice_had_is_said_to_be_lost(tmp_path: Path, root: Path) -> None:
    spec = make_spec(tmp_path, root, replicas=1)
    with pytest.raises(JobOver, match="the state is lost, and 5 committed steps"):
        run(spec, faults={(1, 5): ("kill", 1)}, spread=True)
    (ended,) = of_kind(outcome(spec).records, RunEnded)
    assert (ended.outcome, ended.exit_status) == ("failed", 1)


def test_too_few_slices_are_waited_for_and_then_fail_clearly(tmp_path: Path, root: Path) -> None:
    spec = make_spec(tmp_path, root, min_slices=3, wait_s=0.1)
    with pytest.raises(JobOver, match="2 of at least 3 slices were there in time"):
        run(spec, faults={(1, 5): ("kill", 1)})
    result = outcome(spec)
    assert result.records[-1] == of_kind(result.records, RunEnded)[0]
    assert result.report.badput_s.wait >= 0.1


@pytest.mark.parametrize("error", [ValueError("bad data"), OSError("disk full")])
def test_error_of_the_script_passes_through_and_is_not_tried_again(
    tmp_path: Path, root: Path, error: Exception
) -> None:
    spec, attempts = make_spec(tmp_path, root), []

    def hook(world: object, step: int) -> None:
        attempts.append(step)
        if step == 3:
            raise error

    with pytest.raises(type(error), match=str(error)):
        train(open_session(spec), 12, hook)
    assert attempts == [0, 1, 2, 3]
    assert str(error) in outcome(spec).report.run.error
    assert not list(root.iterdir())


def test_error_of_the_runtime_without_a_loss_passes_through(tmp_path: Path, root: Path) -> None:
    import jax

    spec, attempts = make_spec(tmp_path, root), []

    def hook(world: object, step: int) -> None:
        attempts.append(step)
        if step == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        train(open_session(spec), 12, hook)
    assert attempts == [0, 1, 2, 3]


def test_error_of_the_runtime_that_a_loss_explains_is_taken_for_it(tmp_path: Path, root: Path) -> None:
    import jax

    def raise_once(world: object, step: int) -> None:
        if getattr(world, "generation", 0) == 1 and step == 3:
            raise jax.errors.JaxRuntimeError("INTERNAL: device lost")

    spec = make_spec(tmp_path, root)
    train(open_session(spec), 12, faults_at({(1, 3): ("kill", 1)}, raise_once))
    assert_nothing_lost(outcome(spec))


@pytest.mark.parametrize(
    "cadence", [EverySteps(steps=5), EverySeconds(seconds=60), StallBudget(fraction=0.5)]
)
def test_loss_costs_no_step_at_any_cadence(
    tmp_path: Path, root: Path, undisturbed: dict[int, float], cadence: Cadence
) -> None:
    result = run(make_spec(tmp_path, root, cadence=cadence), faults={(1, 7): ("kill", 0)})
    assert_nothing_lost(result)
    assert_same_losses(result, undisturbed, 1)
    captured = {record.step for record in of_kind(result.records, StepCommitted) if record.captured_bytes}
    assert {0, 11} <= captured
    if isinstance(cadence, EverySeconds):
        assert captured == {0, 1, 11}  # 1: the first of the new world, which has measured nothing yet
        assert result.report.snapshots.interval_steps > 1
        assert result.report.steps.replayed == 6


def test_told_slice_leaves_with_a_snapshot_that_was_not_due(tmp_path: Path, root: Path) -> None:
    result = run(make_spec(tmp_path, root, cadence=EverySteps(steps=100)), faults={(1, 5): ("term", 2)})
    assert_nothing_lost(result)
    assert result.report.steps.replayed == 0
    assert [step for _, step in result.attempts] == list(range(12))
