"""What the recovery state machine does about the loss of workers, agents and hosts."""

import pytest
from model_job import TIMING, Job

from elastic.events import Committed, Phase, ResetHost, StepFailed, Tick, WorkerLost, WorkerState
from elastic.records import MessageRefused, WorkerEvent, WorldFormed


def worlds(job: Job) -> list[tuple[tuple[int, ...], str, int | None]]:
    return [(world.slices, world.mode, world.restored_step) for world in job.formed]


def test_job_without_a_fault_runs_in_one_world() -> None:
    job = Job(3).run()
    job.assert_completed()
    assert worlds(job) == [((0, 1, 2), "first", None)]


def test_job_rehearses_the_smaller_world_before_the_full_one() -> None:
    job = Job(3, rehearsals=1).run()
    job.assert_completed()
    modes = [(world.slices, world.mode) for world in job.records(WorldFormed)]
    assert modes == [((0, 1), "rehearsal"), ((0, 1, 2), "first")]
    assert job.formed[0].restored_step is None


def test_job_rehearses_with_the_rest_when_a_slice_dies_in_the_rehearsal() -> None:
    job = Job(3, rehearsals=1, rejoin_after_steps=3)
    job.when_phase(Phase.REPLAYING, lambda: job.kill_worker(0))
    job.run()
    job.assert_completed()
    assert [world.slices for world in job.records(WorldFormed)][:2] == [(0, 1), (1, 2)]
    assert worlds(job)[0][1] == "first"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_loss_of_any_slice_goes_on_in_place_from_the_newest_whole_step(lost: int) -> None:
    job = Job(3, rejoin_after_steps=None)
    job.when_step(7, lambda: job.kill_worker(lost))
    job.run()
    job.assert_completed()
    survivors = tuple(index for index in range(3) if index != lost)
    assert [world[:2] for world in worlds(job)] == [((0, 1, 2), "first"), (survivors, "in-place")]
    formed = job.formed[1]
    assert formed.restored_step is not None
    assert formed.newest_committed - 1 <= formed.restored_step <= formed.newest_committed
    assert formed.lost == (lost,)
    assert job.losses == [(lost, "process-exit")]
    assert all(host.num_workers == 1 for host in job.hosts)


def test_survivor_that_does_not_unwind_is_ended_and_started_again() -> None:
    job = Job(3, rejoin_after_steps=None)

    def strike() -> None:
        assert job.hosts[1].worker is not None
        job.hosts[1].worker.stuck = True
        job.kill_worker(2)

    job.when_step(7, strike)
    job.run()
    job.assert_completed()
    assert [world[:2] for world in worlds(job)] == [((0, 1, 2), "first"), ((0, 1), "respawn")]
    assert [host.num_workers for host in job.hosts] == [1, 2, 1]
    states = [(event.slice_index, event.state) for event in job.records(WorkerEvent)]
    assert (1, "respawned") in states
    assert (0, "unwound") in states


def test_late_news_of_an_ended_worker_is_not_taken_for_the_loss_of_the_next() -> None:
    job = Job(3, rejoin_after_steps=None)

    def strike() -> None:
        assert job.hosts[1].worker is not None
        job.hosts[1].worker.stuck = True
        job.kill_worker(2)

    def late_news() -> None:
        late = WorkerLost(member=1, pid=2001, cause="killed", detector="process-exit", last_life_unix_s=0.0)
        job.tell(late)
        assert job.state.member(1).worker is WorkerState.STARTING
        assert job.state.member(1).respawning

    job.when_step(7, strike)
    job.when(lambda job: job.state.overtime, late_news)
    job.run()
    job.assert_completed()
    assert [world[:2] for world in worlds(job)][1:] == [((0, 1), "respawn")]


@pytest.mark.parametrize(
    "phase",
    [Phase.SUSPECT, Phase.FENCING, Phase.RESTORING, Phase.REBUILDING, Phase.REPLAYING],
)
@pytest.mark.parametrize("second", [0, 2])
def test_second_loss_in_any_phase_goes_on_with_who_is_left(phase: Phase, second: int) -> None:
    job = Job(4, rejoin_after_steps=None, replicas=3, seed=3)

    def strike() -> None:
        job.when_phase(phase, lambda: job.kill_worker(second), generation=1)
        if phase is Phase.SUSPECT:
            job.tell(StepFailed(member=0, generation=job.state.generation, error="Connection reset"))
        job.kill_worker(1)

    job.when_step(7, strike)
    job.run()
    job.assert_completed()
    assert phase.value in job.phases
    left = tuple(index for index in range(4) if index not in (1, second))
    assert worlds(job)[-1][0] == left
    assert {loss[0] for loss in job.losses} == {1, second}


@pytest.mark.parametrize("phase", [Phase.PLANNING, Phase.REBUILDING, Phase.REPLAYING])
def test_loss_before_the_first_step_begins_again_with_who_is_left(phase: Phase) -> None:
    job = Job(3, rejoin_after_steps=None)
    job.when_phase(phase, lambda: job.kill_worker(0))
    job.run()
    job.assert_completed()
    assert worlds(job)[-1][0] == (1, 2)


def test_loss_of_all_workers_but_one_goes_on_with_that_one_and_grows_again() -> None:
    job = Job(3, num_steps=30)
    job.when_step(7, lambda: job.kill_workers(0, 2))
    job.run()
    job.assert_completed()
    assert worlds(job)[1][:2] == ((1,), "in-place")
    assert worlds(job)[-1][:2] == ((0, 1, 2), "scale-up")


def test_loss_of_all_workers_respawns_them_together_from_the_arenas() -> None:
    job = Job(3)
    job.when_step(7, lambda: job.kill_workers(0, 1, 2))
    job.run()
    job.assert_completed()
    assert [world[:2] for world in worlds(job)] == [((0, 1, 2), "first"), ((0, 1, 2), "respawn")]
    assert job.formed[1].restored_step is not None
    assert "WAITING" in job.phases


def test_loss_of_all_hosts_fails_and_says_how_many_steps_are_lost() -> None:
    job = Job(3)
    job.when_step(7, lambda: job.kill_hosts(0, 1, 2, back_s=0.5))
    job.run()
    outcome, error = job.outcome
    assert outcome == "failed"
    assert "the state is lost, and 8 committed steps with it" in error
    assert len(job.formed) == 1


def test_loss_of_all_hosts_for_good_fails_after_the_wait_and_says_so() -> None:
    job = Job(3)
    job.when_step(7, lambda: job.kill_hosts(0, 1, 2))
    job.run(until_s=60.0)
    assert "0 of at least 1 slices" in job.state.error
    assert "the state is lost, and 8 committed steps with it" in job.state.error


def test_host_whose_memory_is_needed_is_waited_for() -> None:
    job = Job(3, replicas=1)  # every array lives on one host only
    job.when_step(7, lambda: job.kill_agent(2, back_s=TIMING.agent_grace_s / 2))
    job.when_step(7, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert worlds(job)[1][0] == (0, 2)


def test_host_whose_memory_is_needed_may_come_back_as_long_as_the_job_waits() -> None:
    job = Job(3, replicas=1)
    job.when_step(7, lambda: job.cut(2, for_s=3.0))
    job.run()
    job.assert_completed()
    assert "WAITING" in job.phases
    assert any(isinstance(command, ResetHost) for command in job.sent)


def test_below_the_minimum_without_rejoin_waits_and_then_fails_clearly() -> None:
    job = Job(3, min_slices=2, rejoin_after_steps=None)
    job.when_step(7, lambda: job.kill_workers(0, 1))
    job.when_phase(Phase.WAITING, lambda: waits.append(job.now_s), generation=2)
    waits: list[float] = []
    job.run()
    outcome, error = job.outcome
    assert outcome == "failed"
    assert "1 of at least 2 slices were there in time (there: slice 2)" in error
    assert "was left in the hosts' memory" in error
    assert "killed by SIGKILL" in error
    assert job.now_s - waits[0] == pytest.approx(TIMING.wait_s, abs=0.3)


def test_below_the_minimum_with_rejoin_waits_and_goes_on() -> None:
    job = Job(3, min_slices=2, num_steps=30)
    job.when_step(7, lambda: job.kill_workers(0, 1))
    job.run()
    job.assert_completed()
    assert "WAITING" in job.phases
    assert all(len(world.slices) >= 2 for world in job.formed)


def test_slice_that_never_gets_to_its_session_is_given_up() -> None:
    job = Job(2, min_slices=2, max_starts=3)
    job.hosts[1].start_fails = 99
    job.run()
    assert job.outcome[0] == "failed"
    assert "slice 1: exit status 1" in job.outcome[1]
    assert job.hosts[1].num_workers == 3
    assert job.now_s < TIMING.start_s


# ---- agents ------------------------------------------------------------------------------------------------


def test_agent_back_within_the_grace_adopts_its_worker_and_changes_nothing() -> None:
    job = Job(3)
    job.when_step(5, lambda: job.kill_agent(1, back_s=TIMING.agent_grace_s / 2))
    job.run()
    job.assert_completed()
    assert len(job.formed) == 1
    assert ("adopted", 2001) in [(event.state, event.pid) for event in job.records(WorkerEvent)]


def test_agent_away_past_the_grace_is_a_loss_and_its_worker_is_ended_when_it_comes_back() -> None:
    job = Job(3, num_steps=60)
    job.when_step(5, lambda: job.kill_agent(1, back_s=TIMING.agent_grace_s + 0.5))
    job.run()
    job.assert_completed()
    assert (1, "agent-heartbeat") in job.losses
    assert worlds(job)[1][:2] == ((0, 2), "in-place")
    resets = [command for command in job.sent if isinstance(command, ResetHost)]
    assert resets == [ResetHost(member=1)]
    assert worlds(job)[-1][:2] == ((0, 1, 2), "scale-up")
    assert job.hosts[1].num_workers == 2


def test_coordinator_that_reaches_nobody_for_less_than_the_lease_loses_nobody() -> None:
    job = Job(3)
    job.when_step(5, lambda: [job.cut(index, TIMING.agent_grace_s * 2) for index in range(3)] and None)
    job.run()
    job.assert_completed()
    assert job.losses == []
    assert [slices for slices, _, _ in worlds(job)] == [(0, 1, 2)]


def test_slice_that_stays_away_when_the_others_are_heard_again_is_lost_after_the_grace() -> None:
    job = Job(3, rejoin_after_steps=None, num_steps=60)

    def strike() -> None:
        job.cut(0, TIMING.agent_grace_s * 1.5)
        job.cut(1, TIMING.agent_grace_s * 1.7)
        job.cut(2, TIMING.lease_s * 3)

    job.when_step(5, strike)
    job.run()
    job.assert_completed()
    assert job.losses == [(2, "agent-heartbeat")]


def test_worker_that_ended_while_its_agent_was_away_is_a_loss() -> None:
    job = Job(3, rejoin_after_steps=None)

    def strike() -> None:
        job.kill_agent(1, back_s=0.3)
        job.kill_worker(1)

    job.when_step(5, strike)
    job.run()
    job.assert_completed()
    assert worlds(job)[1][0] == (0, 2)
    assert {loss[0] for loss in job.losses} == {1}


def test_worker_that_could_go_on_alone_has_its_lease_waited_out() -> None:
    job = Job(2, rejoin_after_steps=0, replicas=2, num_steps=80)
    job.when_step(5, lambda: job.kill_worker(1))
    times: dict[str, float] = {}

    def cut() -> None:
        times["cut"] = job.now_s
        job.cut(0, for_s=30.0)

    job.when(lambda job: job.state.phase is Phase.RUNNING and job.state.world == (0,), cut)
    job.when(lambda job: "cut" in times and job.state.generation > 2, lambda: times.update(next=job.now_s))
    job.run()
    assert times["next"] - times["cut"] >= TIMING.lease_s


def test_silent_agent_is_left_out_after_its_bound() -> None:
    job = Job(3, rejoin_after_steps=None, num_steps=30)

    def strike() -> None:
        agent = job.hosts[1].agent
        assert agent is not None
        agent._report = lambda: None  # type: ignore[method-assign]
        job.kill_worker(2)

    job.when_step(5, strike)
    job.run()
    job.assert_completed()
    assert worlds(job)[1][0] == (0,)


# ---- stale news --------------------------------------------------------------------------------------------


def test_commit_of_an_older_generation_is_refused_and_written_down() -> None:
    job = Job(3, rejoin_after_steps=None)
    job.when_step(7, lambda: job.kill_worker(2))

    def late() -> None:
        newest = job.state.newest_committed
        job.tell(Committed(member=2, generation=1, step=newest + 5))
        assert job.state.newest_committed == newest

    job.when_phase(Phase.RUNNING, late, generation=2)
    job.run()
    job.assert_completed()
    assert any("generation 1" in refused.reason for refused in job.records(MessageRefused))


def test_failed_step_of_an_older_generation_changes_nothing() -> None:
    job = Job(3, rejoin_after_steps=None)
    job.when_step(7, lambda: job.kill_worker(2))
    job.when_phase(
        Phase.RUNNING,
        lambda: job.tell(StepFailed(member=0, generation=1, error="late")),
        generation=2,
    )
    job.run()
    job.assert_completed()
    assert len(job.formed) == 2


def test_service_that_does_not_start_is_asked_for_again_and_then_fails_the_job() -> None:
    job = Job(2)
    job.service_works = False
    job.run()
    assert job.outcome == (
        "failed",
        "the restore failed 4 times in a row: the runtime service did not come up",
    )


def test_tick_in_a_quiet_world_changes_nothing() -> None:
    job = Job(2)
    job.when_step(5, lambda: None)
    job.run(until_s=1.2)
    before, sent = job.state, len(job.sent)
    job.tell(Tick())
    assert job.state == before
    assert len(job.sent) == sent
