"""Joining: what is done before the others stop; a joiner that dies while joining never stops them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest
from model_job import Job
from model_state import layout_for

from elastic.agent_prepare import Preparer
from elastic.events import Phase, StopAfter, WorkerState
from elastic.join_events import PrepareHost
from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.job import JobLock


def joined_world(job: Job) -> bool:
    return job.state.generation == 3 and job.state.world == (0, 1, 2)


def is_joining(job: Job, phase: Phase) -> bool:
    return joined_world(job) and job.state.phase is phase


MOMENTS: dict[str, Callable[[Job], bool]] = {
    "while it starts": lambda job: job.hosts[1].worker is not None and job.state.generation == 2,
    "ready, being prepared": lambda job: (
        job.state.generation == 2 and job.state.member(1).worker is WorkerState.READY
    ),
    "ready, while the others go to the boundary": lambda job: job.state.joining,
    "FENCING": lambda job: job.state.generation == 3 and job.state.phase is Phase.FENCING,
    "RESTORING": lambda job: is_joining(job, Phase.RESTORING),
    "REBUILDING": lambda job: is_joining(job, Phase.REBUILDING),
    "REPLAYING": lambda job: is_joining(job, Phase.REPLAYING),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kill", ["worker", "host"])
def test_joiner_that_dies_while_joining_never_stops_the_others(moment: str, kill: str) -> None:
    job = Job(3, num_steps=160, rejoin_after_steps=2)
    job.when_step(5, lambda: job.kill_worker(1))

    def strike() -> None:
        job.kill_worker(1) if kill == "worker" else job.kill_host(1, back_s=0.5)

    job.when(MOMENTS[moment], strike)
    job.run()
    job.assert_completed()
    assert all(world.restored_step == world.newest_committed for world in job.formed[2:])
    assert job.formed[-1].slices == (0, 1, 2)


def test_room_is_made_before_the_others_are_told_to_stop() -> None:
    job = Job(3, num_steps=40)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    orders = [command for command in job.sent if isinstance(command, PrepareHost | StopAfter)]
    assert [type(order) for order in orders] == [PrepareHost, StopAfter, StopAfter]
    assert orders[0].member == 1


def test_host_that_makes_no_room_in_time_joins_all_the_same() -> None:
    job = Job(3, num_steps=120)
    job.when_step(5, lambda: job.kill_worker(1))
    sent = []

    def lose_the_order() -> None:
        sent.append(job.now_s)
        job.state = job.state.with_member(1, prepared=False, prepare_by_s=job.now_s + 1.0)

    job.when(lambda job: job.state.member(1).prepared, lose_the_order)
    job.run()
    job.assert_completed()
    assert len(sent) == 1
    assert job.formed[-1].slices == (0, 1, 2)


def test_idle_spare_is_prepared_once() -> None:
    job = Job(2, spares=1, num_steps=30)
    job.run()
    job.assert_completed()
    (order,) = [command for command in job.sent if isinstance(command, PrepareHost)]
    assert order.member == 2
    assert order.layout == layout_for((2, 1))


def test_room_that_is_made_is_what_the_worker_asks_for(tmp_path: Path) -> None:
    lock = JobLock.acquire("prepare", root=tmp_path)
    arena = Arena.create("prepare", HostId(1), root=tmp_path)
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    preparer = Preparer(arena, 1, 2, told.put)
    preparer.prepare(PrepareHost(member=1, layout=layout_for((0, 1))))
    answer = told.get(timeout=10.0)
    assert getattr(answer, "error", None) == ""
    sizes = [path.stat().st_size for path in arena.slot_files() if path.name.startswith("slot")]
    assert len(sizes) == 2
    preparer.reserve(preparer.slot_bytes(layout_for((0, 1))), 0, 0)
    assert [path.stat().st_size for path in arena.slot_files() if path.name.startswith("slot")] == sizes
    arena.unlink()
    lock.unlink()
