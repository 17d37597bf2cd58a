"""Compiling for the next world beside the one that trains: when, for whom, and what ends it."""

from __future__ import annotations

import random

import pytest
from model_job import Job
from test_machine_simulation import build_job

from elastic.events import Fence, Phase
from elastic.records import ShadowCompiled
from elastic.shadow import Shadow
from elastic.shadow_events import EndShadow, EnterShadow, StartShadow


def compiled(job: Job) -> list[tuple[int, str]]:
    return [(record.num_slices, record.outcome) for record in job.records(ShadowCompiled)]


def test_next_smaller_world_comes_before_the_next_larger_and_neither_twice() -> None:
    shadow = Shadow()
    assert shadow.next_size(3, 1, 4, 4, generation=1) == 2
    shadow = Shadow(compiled=frozenset({2, 3}))
    assert shadow.next_size(3, 1, 4, 4, generation=1) == 4
    assert shadow.next_size(3, 1, 4, 3, generation=1) is None
    assert Shadow(tried=frozenset({(1, 2)})).next_size(3, 1, 3, 3, generation=1) is None
    assert Shadow(tried=frozenset({(1, 2)})).next_size(3, 1, 3, 3, generation=2) == 2
    assert Shadow().next_size(2, 2, 2, 2, generation=1) is None
    assert Shadow().next_size(1, 1, 1, 1, generation=1) is None


def test_each_smaller_world_is_compiled_before_it_is_needed() -> None:
    job = Job(3, precompile=True, num_steps=80, rejoin_after_steps=None)
    job.when_step(30, lambda: job.kill_worker(2))
    job.run()
    job.assert_completed()
    assert compiled(job) == [(2, "compiled"), (1, "compiled")]


def test_rehearsed_world_is_not_compiled_again() -> None:
    job = Job(3, precompile=True, rehearsals=1, num_steps=60, rejoin_after_steps=None)
    job.when_step(20, lambda: job.kill_worker(0))
    job.run()
    job.assert_completed()
    assert compiled(job) == [(1, "compiled")]
    groups = [command.slices for command in job.sent if isinstance(command, EnterShadow)]
    assert groups == [(1,)]


def test_larger_world_that_never_was_is_compiled_with_a_host_that_has_no_worker_yet() -> None:
    job = Job(3, precompile=True, num_steps=80, late_s={2: 17.0})
    job.hosts[2].start_fails = 8
    job.run()
    job.assert_completed()
    assert [len(world.slices) for world in job.formed] == [2]
    assert compiled(job) == [(1, "compiled"), (3, "compiled")]


def test_group_uses_the_ranks_of_the_world_to_come() -> None:
    job = Job(3, precompile=True, num_steps=40, rejoin_after_steps=None)
    job.run()
    entered = [command for command in job.sent if isinstance(command, EnterShadow)]
    assert [(c.member, c.rank, c.slices) for c in entered] == [(0, 0, (0, 1)), (1, 1, (0, 1))]


def test_group_ends_at_once_when_a_recovery_begins_and_is_tried_again() -> None:
    job = Job(3, precompile=True, num_steps=80, rejoin_after_steps=0)
    job.when(lambda job: bool(job.state.shadow.slices), lambda: job.kill_worker(2))
    job.run()
    job.assert_completed()
    assert (2, "given up") in compiled(job)
    begun = next(at for at, command in enumerate(job.sent) if isinstance(command, StartShadow))
    ended = next(at for at, command in enumerate(job.sent) if isinstance(command, EndShadow))
    fenced = next(at for at, c in enumerate(job.sent) if isinstance(c, Fence) and at > begun)
    assert ended < fenced
    assert all(host.agent is None or host.agent.shadow == 0 for host in job.hosts)


def test_group_that_fails_is_not_tried_again_in_the_same_world() -> None:
    job = Job(3, precompile=True, num_steps=60, rejoin_after_steps=None)
    job.shadow_fails = 1.0
    job.run()
    job.assert_completed()
    assert compiled(job) == [(2, "failed")]
    (record,) = job.records(ShadowCompiled)
    assert record.detail.startswith("slice ")


def test_group_is_given_up_when_a_host_of_it_goes_away() -> None:
    job = Job(3, precompile=True, num_steps=60)
    job.when(lambda job: bool(job.state.shadow.slices), lambda: job.kill_agent(0, back_s=0.3))
    job.run()
    job.assert_completed()
    assert compiled(job)[0] == (2, "failed")


def test_nothing_is_compiled_where_it_is_not_wanted() -> None:
    job = Job(3, num_steps=40).run()
    job.assert_completed()
    assert compiled(job) == []


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_compiling_disturbs_no_job_under_random_faults(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import test_machine_simulation

    draw = random.Random(first)

    def job_with_shadows(*arguments: object, **options: object) -> Job:
        job = Job(*arguments, precompile=True, **options)  # type: ignore[arg-type]
        job.shadow_fails = draw.choice((0.0, 0.1))
        return job

    monkeypatch.setattr(test_machine_simulation, "Job", job_with_shadows)
    outcomes = []
    for seed in range(first, first + 50):
        job = build_job(seed).run(until_s=90.0)
        outcomes.append(job.outcome[0])
        if outcomes[-1] == "completed":
            job.assert_completed()
        assert job.state.shadow.slices == ()
        assert job.state.phase in (Phase.COMPLETED, Phase.FAILED)
    assert outcomes.count("completed") > 35
