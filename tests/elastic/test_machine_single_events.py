"""What one event does to a job in a known state, where the model of whole jobs cannot bring it about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_job import Job

from elastic.events import Event, Fenced, Finished, Phase, StartWorker, Tick, WorkerLost, WorkerState, Write
from elastic.machine import step
from elastic.records import LossDetected
from elastic.state import JobState
from elastic.turn import Clock

LATER_S = 1000.0


def state_when(phase: Phase) -> JobState:
    """A job of three slices in this phase, after a first world that made some steps."""
    found: list[JobState] = []
    job = Job(3)
    job.when_step(7, lambda: found.append(job.state))
    if phase is Phase.FENCING:
        job.when_step(7, lambda: job.kill_workers(1))
        job.when_step(7, lambda: job.when_phase(phase, lambda: found.insert(0, job.state)))
    job.run()
    assert found[0].phase is phase
    return found[0]


def after(state: JobState, *events: Event, at_s: float = LATER_S) -> tuple[JobState, list[object]]:
    done: list[object] = []
    for event in events:
        state, commands = step(state, event, Clock(mono_s=at_s, unix_s=at_s))
        done += commands
    return state, done


@pytest.mark.parametrize("aborted", [True, False])
def test_survivor_that_aborts_while_leaving_is_started_again_and_not_counted_as_lost(aborted: bool) -> None:
    state = state_when(Phase.FENCING)
    pid = state.member(2).worker_pid
    assert state.member(2).worker is WorkerState.IN_WORLD
    event = WorkerLost(
        member=2,
        pid=pid,
        cause="SIGABRT",
        detector="process-exit",
        last_life_unix_s=0.0,
        aborted=aborted,
    )
    state, commands = after(state, event, at_s=0.0)
    losses = [c for c in commands if isinstance(c, Write) and isinstance(c.record, LossDetected)]
    assert (state.member(2).worker is WorkerState.STARTING) == aborted
    assert (StartWorker(member=2) in commands) == aborted
    assert bool(losses) != aborted


@pytest.mark.parametrize("aborted", [True, False])
def test_survivor_that_aborts_just_after_it_has_left_is_started_again_and_not_lost(aborted: bool) -> None:
    state = state_when(Phase.FENCING)
    report = Fenced(
        member=2, generation=state.generation, worker=WorkerState.READY, snapshots=(), rejected=()
    )
    state, _ = after(state, report, at_s=0.0)
    assert (state.phase, state.member(2).worker) == (Phase.FENCING, WorkerState.READY)
    pid = state.member(2).worker_pid
    event = WorkerLost(
        member=2, pid=pid, cause="SIGABRT", detector="process-exit", last_life_unix_s=0.0, aborted=aborted
    )
    state, commands = after(state, event, at_s=0.0)
    losses = [c for c in commands if isinstance(c, Write) and isinstance(c.record, LossDetected)]
    assert state.member(2).respawning == aborted
    assert bool(losses) != aborted


def test_report_of_an_earlier_fencing_told_again_takes_nobody_out_of_a_running_world() -> None:
    state = state_when(Phase.RUNNING)
    again = Fenced(member=1, generation=state.generation, worker=WorkerState.READY, snapshots=())
    state, _ = after(state, again, at_s=0.0)
    assert state.member(1).worker is WorkerState.IN_WORLD
    assert state.phase is Phase.RUNNING


def test_loop_that_ends_on_one_slice_alone_fails_the_job_and_names_it() -> None:
    state = state_when(Phase.RUNNING)
    ended = Finished(member=1, generation=state.generation, step=3)
    state, _ = after(state, ended, at_s=0.0)
    assert state.phase is Phase.RUNNING
    state, _ = after(replace(state), Tick())
    assert state.phase is Phase.FAILED
    assert state.error == "the loop of slice 1 ended after step 3, the others' did not"
