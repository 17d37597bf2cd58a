"""Slices of two hosts: the loss of one host loses its slice, the other host lives on as a spare."""

from __future__ import annotations

from pathlib import Path

import pytest
from momentum_loop import HOLD_OPTIONS, write_script
from real_runs import Run, assert_nothing_lost, finish, left_behind, start

from elastic.records import (
    FaultInjected,
    LossDetected,
    PhaseEntered,
    StateRestored,
    StepCommitted,
    WorkerEvent,
    WorldFormed,
    of_kind,
)

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 80
FEW_STEPS = 40


def train(
    directory: Path, *arguments: str, steps: int = STEPS, held_until_ready: int = 0, takeover_before: int = -1
) -> Run:
    """Two slices of two hosts of two devices; a host holds half of the state, and so does its fellow."""
    # A quarter of the rows on each device of a slice: half of them on each of its hosts.
    specs = '{"w": P("model"), "m": P("model"), "n": P()}'
    script = write_script(
        directory, num_rows=512, num_columns=16, axes='{"data": -1, "model": 4}', specs=specs, steps=steps,
        held_until_ready=held_until_ready, num_slices_at_end=2 if held_until_ready else 0,
        takeover_before=takeover_before,
    )  # fmt: skip
    out = directory / "run"
    process = start(
        directory, "launch", "--slices", "2", "--hosts-per-slice", "2", "--devices-per-host", "2",
        "--rejoin-after-steps", "5", *HOLD_OPTIONS, *arguments, "--out", str(out), "--", str(script),
    )  # fmt: skip
    return finish(process, out)


def pids(run: Run, slice_index: int, host_index: int) -> set[int]:
    """The processes that were a host's worker."""
    events = of_kind(run.records, WorkerEvent)
    return {
        event.pid
        for event in events
        if (event.slice_index, event.host_index) == (slice_index, host_index) and event.pid
    }


@pytest.mark.family("several hosts")
def test_losing_one_host_loses_its_slice_and_the_other_host_waits_as_a_spare(tmp_path: Path) -> None:
    run = train(tmp_path, "--fault", "host:slice=1,host=1@step=15", held_until_ready=5)
    assert_nothing_lost(run, STEPS)
    assert left_behind(run.report.run.id) == []
    (fault,) = of_kind(run.records, FaultInjected)
    (loss,) = of_kind(run.records, LossDetected)
    for record in (fault, loss):
        assert (record.slice_index, record.host_index) == (1, 1)
    lost, joined = run.report.recoveries
    assert (lost.lost_slices, lost.slices_after) == ((1,), (0,))
    assert (joined.joined_slices, joined.slices_after) == ((1,), (0, 1))
    assert [len(pids(run, *host)) for host in ((0, 0), (0, 1), (1, 0), (1, 1))] == [1, 1, 1, 2]
    # The new host's memory was empty: its half of the state comes from the other slice, and nothing else.
    assert joined.bytes_moved == joined.bytes_lower_bound > 0
    restored = [r for r in of_kind(run.records, StateRestored) if r.generation == joined.generation]
    assert {(r.slice_index, r.host_index) for r in restored} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    committed = of_kind(run.records, StepCommitted)
    last = [commit for commit in committed if commit.step == STEPS - 1]
    assert len({(commit.slice_index, commit.host_index) for commit in last}) == 4
    assert len({commit.sample_ids for commit in last}) == 1


@pytest.mark.family("several hosts")
def test_two_slices_that_lose_a_host_each_wait_for_them_and_go_on_from_memory(tmp_path: Path) -> None:
    faults = ("--fault", "kill:slice=0,host=0@step=15", "--fault", "host:slice=1,host=1@step=15")
    run = train(tmp_path, *faults, "--rehearsals", "0", steps=FEW_STEPS)
    assert_nothing_lost(run, FEW_STEPS)
    assert left_behind(run.report.run.id) == []
    lost = {(loss.slice_index, loss.host_index) for loss in of_kind(run.records, LossDetected)}
    assert lost >= {(0, 0), (1, 1)}
    # The healthy hosts are of different slices: nothing is made of them, and their workers live on.
    assert "WAITING" in {record.phase for record in of_kind(run.records, PhaseEntered)}
    assert [len(pids(run, *host)) for host in ((0, 1), (1, 0))] == [1, 1]
    assert run.report.recoveries[-1].slices_after in ((0,), (0, 1))


@pytest.mark.family("several hosts")
def test_spare_slice_takes_the_place_of_one_that_lost_a_host_under_another_coordinator(
    tmp_path: Path,
) -> None:
    faults = ("--fault", "kill:coordinator@step=10", "--fault", "kill:slice=1,host=1@step=60")
    steps = 120
    # The steps are fast: without a hold they were over before the second coordinator could hear of step 60.
    run = train(tmp_path, "--spares", "1", *faults, "--rehearsals", "0", steps=steps, takeover_before=50)
    assert_nothing_lost(run, steps)
    assert left_behind(run.report.run.id) == []
    assert [takeover.goes_on for takeover in run.report.takeovers] == [True]
    worlds = [world.slices for world in of_kind(run.records, WorldFormed)]
    assert worlds == [(0, 1), (0, 2)]
    (loss,) = of_kind(run.records, LossDetected)
    assert (loss.slice_index, loss.host_index) == (1, 1)
    # Every host's commit of every step is in the history once, whichever coordinator wrote it.
    told = [(c.slice_index, c.host_index, c.generation, c.step) for c in of_kind(run.records, StepCommitted)]
    assert len(told) == len(set(told))
    hosts = {(c[0], c[1]) for c in told if c[3] == steps - 1}
    assert hosts == {(0, 0), (0, 1), (2, 0), (2, 1)}
