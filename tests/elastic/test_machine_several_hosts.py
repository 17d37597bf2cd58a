"""Slices of several hosts: what one host's loss means for its slice, and what becomes of its fellows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_job import Job
from straggler_records import committed, formed

from elastic.copy_check import Convicted
from elastic.events import Phase, Stage, StopAfter, WorkerState
from elastic.members import host_of, label_of, member_of, name_of
from elastic.quarantine import Flapping
from elastic.records import LossDetected, PhaseEntered, SliceQuarantined, WorldFormed
from elastic.repeated_deaths import Deaths
from elastic.shadow_events import StartShadow
from elastic.state import Config
from elastic.stragglers import StragglerWatch
from reshard.errors import UsageError
from reshard.ids import HostId


def job(num_slices: int = 2, **options: object) -> Job:
    return Job(num_slices, hosts_per_slice=2, num_steps=30, **options)  # type: ignore[arg-type]


def lost_hosts(job: Job) -> list[tuple[int, int]]:
    return [(loss.slice_index, loss.host_index) for loss in job.records(LossDetected)]


def formed_slices(job: Job) -> list[tuple[int, ...]]:
    return [world.slices for world in job.records(WorldFormed)]


def test_members_are_numbered_slice_by_slice() -> None:
    config = Config(num_slices=2, hosts_per_slice=3)
    hosts = [config.host(member) for member in range(config.num_members)]
    assert hosts == [HostId(index, host) for index in (0, 1) for host in (0, 1, 2)]
    assert [member_of(host, 3) for host in hosts] == list(range(6))
    assert config.members_of(1) == (3, 4, 5)
    assert [config.slice_of(member) for member in range(6)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(UsageError, match="hosts-per-slice"):
        Config(num_slices=2, hosts_per_slice=0)


def test_with_one_host_a_slice_a_member_is_called_by_its_slice() -> None:
    assert (name_of(host_of(2, 1), 1), label_of(host_of(2, 1), 1)) == ("slice 2", "2")
    assert (name_of(host_of(5, 2), 2), label_of(host_of(5, 2), 2)) == ("slice 2 host 1", "2-1")


def test_loss_of_one_host_loses_its_slice_and_its_fellow_waits_as_a_spare() -> None:
    run = job(rejoin_after_steps=3)
    run.when_step(5, lambda: run.kill_worker(3))
    spares: list[frozenset[int]] = []
    run.when(
        lambda job: job.formed[-1:] != [] and job.formed[-1].slices == (0,),
        lambda: spares.append(run.state.spares()),
    )
    run.run().assert_completed()
    assert lost_hosts(run) == [(1, 1)]
    assert formed_slices(run) == [(0, 1), (0,), (0, 1)]
    assert [host.num_workers for host in run.hosts] == [1, 1, 1, 2]
    assert spares == [frozenset({2})]
    assert run.state.spares() == frozenset()
    assert [world.lost for world in run.formed] == [(), (1,), ()]
    assert [world.joined for world in run.formed] == [(), (), (1,)]


def test_new_host_of_a_slice_fetches_its_part_and_its_fellow_what_is_newer() -> None:
    run = job(rejoin_after_steps=3)
    run.when_step(5, lambda: run.kill_host(3, back_s=0.5))
    run.run().assert_completed()
    joined = run.formed[-1]
    assert joined.slices == (0, 1)
    stages = [c for c in run.sent if isinstance(c, Stage) and c.generation == joined.generation]
    assert {c.member for c in stages if c.transfers} >= {2, 3}
    assert joined.bytes_moved == joined.bytes_lower_bound > 0


def test_spares_do_not_stop_the_world_that_goes_on_without_them() -> None:
    run = job(rejoin_after_steps=None)
    run.when_step(5, lambda: run.kill_worker(2))
    run.run().assert_completed()
    assert formed_slices(run) == [(0, 1), (0,)]
    assert not [command for command in run.sent if isinstance(command, StopAfter)]
    assert run.state.member(3).worker is WorkerState.READY


def test_two_slices_that_lose_a_host_each_are_not_made_into_one() -> None:
    run = job(rejoin_after_steps=0)
    run.when_step(5, lambda: run.kill_workers(1, 2))
    run.run().assert_completed()
    assert Phase.WAITING.value in [record.phase for record in run.records(PhaseEntered)][1:]
    assert formed_slices(run)[0] == (0, 1)
    assert [host.num_workers for host in run.hosts] == [1, 2, 2, 1]
    assert set(lost_hosts(run)) == {(0, 1), (1, 0)}


def test_state_in_parts_on_the_hosts_of_a_slice_survives_the_loss_of_unlike_halves_of_two_slices() -> None:
    run = job(rejoin_after_steps=0)
    run.when_step(5, lambda: run.kill_hosts(0, 3, back_s=0.3))
    run.run().assert_completed()


def test_state_whose_one_half_is_lost_on_all_slices_is_not_restored_from_memory() -> None:
    run = job(rejoin_after_steps=0)
    run.when_step(5, lambda: run.kill_hosts(0, 2, back_s=0.3))
    run.run()
    outcome, error = run.outcome
    assert outcome == "failed"
    assert "the state is lost" in error


def test_preemption_of_one_host_costs_no_step_and_leaves_its_fellow_a_spare() -> None:
    run = job(rejoin_after_steps=None)
    run.when_step(5, lambda: run.hosts[3].preempt())
    run.run().assert_completed()
    assert lost_hosts(run) == [(1, 1)]
    assert formed_slices(run) == [(0, 1), (0,)]
    assert run.state.member(2).worker is WorkerState.READY
    after = run.formed[-1]
    assert after.restored_step == after.newest_committed


def test_slice_that_loses_all_hosts_at_once_has_been_lost_once() -> None:
    run = job(rejoin_after_steps=1, flapping=Flapping(base_s=0.5))
    run.when_step(5, lambda: run.kill_workers(2, 3))
    run.run().assert_completed()
    assert run.records(SliceQuarantined) == []
    assert [run.state.member(index).losses_in_row for index in (2, 3)] == [1, 1]


def test_losses_of_different_hosts_are_losses_of_their_slice() -> None:
    run = job(rejoin_after_steps=1, flapping=Flapping(base_s=0.5))
    run.when_step(5, lambda: run.kill_worker(2))
    run.when(
        lambda job: len(job.formed) == 3 and job.state.phase is Phase.RUNNING, lambda: run.kill_worker(3)
    )
    run.run().assert_completed()
    (kept_away,) = run.records(SliceQuarantined)
    assert (kept_away.slice_index, kept_away.losses_in_row) == (1, 2)
    assert lost_hosts(run) == [(1, 0), (1, 1)]


def test_host_cut_off_from_the_one_slice_left_is_not_waited_for_longer_than_an_agent() -> None:
    run = job(1, min_slices=1, rejoin_after_steps=0)
    run.when_step(5, lambda: run.cut(1, for_s=6.0))
    run.run(until_s=60.0)
    (loss,) = run.records(LossDetected)[:1]
    waited_s = loss.unix_s - loss.last_life_unix_s
    assert waited_s < run.config.timing.lease_s
    run.assert_completed()


def test_slice_cut_off_as_a_whole_has_its_lease_waited_out() -> None:
    run = job(2, rejoin_after_steps=None)
    run.when_step(5, lambda: run.kill_workers(2, 3))
    run.when(
        lambda job: len(job.formed) == 2 and job.state.phase is Phase.RUNNING,
        lambda: (run.cut(0, for_s=20.0), run.cut(1, for_s=20.0)),
    )
    run.run(until_s=90.0)
    loss = next(loss for loss in run.records(LossDetected) if loss.slice_index == 0)
    assert loss.unix_s - loss.last_life_unix_s >= run.config.timing.lease_s


def test_spare_slice_takes_the_place_of_one_that_lost_a_host_and_the_lost_one_is_the_next_spare() -> None:
    run = job(spares=1, rejoin_after_steps=0, min_slices=2)
    run.when_step(5, lambda: run.kill_worker(1))
    run.when(
        lambda job: len(job.formed) == 2 and job.state.newest_committed == 20, lambda: run.kill_worker(3)
    )
    run.run().assert_completed()
    assert formed_slices(run) == [(0, 1), (2, 1), (2, 0)]
    assert lost_hosts(run) == [(0, 1), (1, 1)]


def test_spare_slice_that_is_not_whole_takes_nobodys_place() -> None:
    run = job(spares=1, rejoin_after_steps=None)
    run.when_step(3, lambda: run.kill_worker(5))
    run.when_step(8, lambda: run.kill_worker(3))
    run.run().assert_completed()
    assert formed_slices(run) == [(0, 1), (0,)]
    assert run.state.spares() == frozenset({2, 4})


def test_slice_with_a_wrong_copy_is_thrown_out_with_all_of_its_hosts() -> None:
    run = job(3, on_corruption="throw-out", rejoin_after_steps=3)
    wrong = (Convicted(slice_index=1, path="weights", step=5),)

    def convict() -> None:
        run.state = replace(run.state, copies=replace(run.state.copies, convicted=wrong))

    run.when_step(5, convict)
    run.run().assert_completed()
    assert lost_hosts(run) == [(1, 0)]
    assert formed_slices(run) == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert [host.num_workers for host in run.hosts] == [1, 1, 2, 2, 1, 1]
    assert [run.state.member(index).losses_in_row for index in (2, 3)] == [1, 1]


def test_programs_are_not_compiled_beside_a_world_of_several_hosts_a_slice() -> None:
    run = job(3, precompile=True)
    run.run().assert_completed()
    assert not [command for command in run.sent if isinstance(command, StartShadow)]


def test_deaths_at_one_step_name_slice_and_host() -> None:
    deaths = Deaths()
    for generation in (1, 2):
        deaths = deaths.died(7, generation, 3, "SIGKILL", "")
    assert "killed at step 8 2 times in a row (exit by SIGKILL; slice 1 host 1, slice 1 host 1)" in (
        deaths.verdict(2, 2)
    )


def test_slow_host_is_told_with_its_slice() -> None:
    watch = StragglerWatch(hosts_per_slice=2)
    watch.hear(formed(1, (0, 1)))
    told = [
        found
        for step in range(80)
        for index, host in ((0, 0), (0, 1), (1, 0), (1, 1))
        for found in watch.hear(
            replace(
                committed(step, index), host_index=host, host_s=0.05 if (index, host) == (1, 1) else 0.002
            )
        )
    ]
    (seen,) = told
    assert (seen.slice_index, seen.host_index, seen.where) == (1, 1, "input")
