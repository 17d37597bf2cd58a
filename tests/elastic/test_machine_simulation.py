"""Random faults at random moments, then healing: safety is asserted at every event, progress within a bound.

A failure names the seed, the hosts a slice and the spare slices, and whether coordinators died; with these
`PYTHONPATH=tests/elastic python tests/elastic/test_machine_simulation.py SEED [H [S [CRASHES]]]` runs it
again and prints what happened.
"""

import random
import sys
from functools import partial

import pytest
from hypothesis import settings
from model_job import Job

from elastic.events import Phase
from elastic.records import PhaseEntered

SEEDS_PER_TEST = 25
NUM_SEEDS = 4 * settings().max_examples
"""125 by default, 5,000 with the profile "deep"."""
FAULTS_S = 6.0
BOUND_S = 90.0
PHASES = (
    Phase.RUNNING,
    Phase.SUSPECT,
    Phase.FENCING,
    Phase.PLANNING,
    Phase.RESTORING,
    Phase.REBUILDING,
    Phase.REPLAYING,
    Phase.WAITING,
)


def build_job(seed: int, hosts_per_slice: int = 1, spares: int = 0) -> Job:
    """A job of random size with random faults, all of which heal."""
    draw = random.Random(seed)
    num_slices = draw.choice((1, 2, 2, 3, 3, 3, 4, 5))
    job = Job(
        num_slices,
        seed=seed,
        num_steps=draw.randint(10, 30),
        delay_s=(0.001, draw.choice((0.005, 0.02, 0.2))),
        late_s={
            index: draw.uniform(0.0, 2.0)
            for index in range((num_slices + spares) * hosts_per_slice)
            if draw.random() < 0.2
        },
        hosts_per_slice=hosts_per_slice,
        spares=spares,
        min_slices=draw.randint(1, max(1, num_slices - 1)),
        replicas=draw.choice((1, 2, 2, num_slices)),
        rehearsals=draw.choice((0, 0, 1, 2)),
        rejoin_after_steps=draw.choice((0, 0, 3)),
        max_starts=30,
        persist_every=draw.choice((None, 2, 4)),
        keeps_runtime=draw.random() < 0.7,
    )
    for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        _plan_fault(job, draw)
    if draw.random() < 0.2:
        _plan_spurious_failure(job, draw)
    return job


def _plan_fault(job: Job, draw: random.Random) -> None:
    host = job.hosts[draw.randrange(len(job.hosts))]
    back_s = draw.uniform(0.05, 3.0)
    kind = draw.choice(("kill", "kill", "kill", "agent", "host", "cut", "stick", "preempt", "stage", "all"))

    def strike() -> None:
        if kind == "kill":
            host.kill_worker("killed by SIGKILL")
        elif kind == "agent":
            host.kill_agent(back_s)
        elif kind == "host":
            host.kill_host(back_s)
        elif kind == "cut":
            host.cut_off(0.5 + 2 * back_s)
        elif kind == "stick" and host.worker is not None:
            host.worker.stuck = True
        elif kind == "preempt":
            host.preempt()
        elif kind == "stage":
            host.start_fails = 1
        elif kind == "all":
            for other in job.hosts:
                job.after(draw.uniform(0.0, 0.1), partial(other.kill_worker, "killed"))

    if draw.random() < 0.5:
        job.after(draw.uniform(0.5, FAULTS_S), strike)
    else:
        phase, generation, delay_s = draw.choice(PHASES), draw.randint(1, 6), draw.uniform(0.0, 0.1)
        job.when_phase(phase, lambda: job.after(delay_s, strike), generation=generation)


def _plan_spurious_failure(job: Job, draw: random.Random) -> None:
    host = job.hosts[draw.randrange(len(job.hosts))]
    job.after(draw.uniform(1.0, FAULTS_S), host.fail_step)


def plan_crashes(job: Job, seed: int) -> None:
    """The coordinator dies too, at random moments and phases, for moments or for longer than a lease."""
    draw = random.Random(-seed - 1)

    def crash() -> None:
        job.crash_coordinator(draw.choice((0.0, 0.01, 0.3, 1.5, 5.0)))

    for _ in range(draw.choice((1, 1, 2, 3))):
        if draw.random() < 0.5:
            job.after(draw.uniform(0.1, FAULTS_S), crash)
        else:
            phase, generation = draw.choice(PHASES), draw.randint(1, 5)
            job.when_phase(phase, crash, generation=generation)


def check(seed: int, hosts_per_slice: int = 1, spares: int = 0, *, crashes: bool = False) -> str:
    """Run a seed; raises with the seed in the message when a promise is broken."""
    job = build_job(seed, hosts_per_slice, spares)
    if crashes:
        plan_crashes(job, seed)
    try:
        job.run(until_s=BOUND_S)
        outcome, error = job.outcome
        if outcome == "completed":
            job.assert_completed()
        else:
            assert "is lost" in error, error
    except Exception as failed:
        what = f"seed {seed} {hosts_per_slice} {spares}" + " crashes" * crashes
        raise AssertionError(f"{what} at {job.now_s:.3f} s: {failed}") from failed
    return outcome


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_machine_keeps_every_promise_under_random_faults(first: int) -> None:
    outcomes = [check(seed) for seed in range(first, first + SEEDS_PER_TEST)]
    assert outcomes.count("completed") > 0.7 * SEEDS_PER_TEST


@pytest.mark.parametrize("hosts_per_slice", [2, 3])
@pytest.mark.parametrize("first", range(0, 2 * settings().max_examples, SEEDS_PER_TEST))
def test_machine_keeps_every_promise_with_several_hosts_a_slice(first: int, hosts_per_slice: int) -> None:
    outcomes = [check(seed, hosts_per_slice) for seed in range(first, first + SEEDS_PER_TEST)]
    assert outcomes.count("completed") > 0.6 * SEEDS_PER_TEST


@pytest.mark.parametrize("first", range(1000, 1000 + 4 * settings().max_examples, SEEDS_PER_TEST))
def test_machine_keeps_every_promise_when_its_coordinator_dies_too(first: int) -> None:
    outcomes = [check(seed, crashes=True) for seed in range(first, first + SEEDS_PER_TEST)]
    assert outcomes.count("completed") > 0.7 * SEEDS_PER_TEST


@pytest.mark.parametrize("spares", [0, 1, 2])
@pytest.mark.parametrize("first", range(2000, 2100, SEEDS_PER_TEST))
def test_machine_keeps_every_promise_with_several_hosts_spare_slices_and_crashes(
    first: int, spares: int
) -> None:
    seeds = range(first, first + SEEDS_PER_TEST)
    outcomes = [check(seed, 2, spares, crashes=True) for seed in seeds]
    assert outcomes.count("completed") > 0.6 * SEEDS_PER_TEST


def test_machine_simulation_repeats_exactly_from_its_seed() -> None:
    first, second = build_job(7).run(), build_job(7).run()
    assert first.history == second.history
    assert first.sent == second.sent


if __name__ == "__main__":
    again = build_job(*map(int, sys.argv[1:4]))
    if sys.argv[4:]:
        plan_crashes(again, int(sys.argv[1]))
    try:
        again.run(until_s=BOUND_S)
    finally:
        for record in again.history:
            is_phase = isinstance(record, PhaseEntered)
            print(f"{record.unix_s % 1000:8.3f}", "\n  " * is_phase, record)
