"""A process that stands by waits at its session and takes the worker's place; its death is nobody's loss."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import waiting
from waiting import is_alive, state_of

from elastic import low_priority
from elastic.agent_standby import CALM_COMMITS, WARM_FILE, WarmWorker
from elastic.events import WorldSpec
from elastic.job import JobSpec, save_job
from elastic.protocol import Hello, Rehearsed, TakeTurn
from elastic.solo_worlds import solo_world
from elastic.state import Config
from elastic.wire import FramedSocket
from elastic.worker_process import WorkerExit
from elastic.worker_socket import WorkerSocket
from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.job import JobLock

BOUND_S = 30.0
wait_until = partial(waiting.wait_until, within_s=BOUND_S)
AT_SESSION = """
import os, sys
from pathlib import Path
from elastic.agent_link import AgentLink
from elastic.job import load_job
directory = Path(os.environ["ELASTIC_DIR"])
AgentLink(load_job(directory), 0, lambda: None)
(directory / "turn").write_text(str(os.getpid()))
sys.stdin.read()
import time; time.sleep(60)
"""
REHEARSES = """
import os, time
from pathlib import Path
from elastic.agent_link import AgentLink
from elastic.job import load_job
directory = Path(os.environ["ELASTIC_DIR"])
link = AgentLink(load_job(directory), 0, lambda: None)
world = link.wait_world()
while not (directory / "go").exists():
    time.sleep(0.01)
link.rehearsed(world.generation, "one slice")
link.wait_world()
"""
ENDS = "raise SystemExit(3)"


@dataclass
class Host:
    """What an agent has for its standby: a socket, an arena's directory, a clock that a test moves."""

    spec: JobSpec
    directory: Path
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    now_s: float = 0.0

    def warm(self, worlds: tuple[WorldSpec, ...] = ()) -> WarmWorker:
        return WarmWorker(
            self.spec, 0, self.directory, self.inbox.put, worlds=lambda: worlds, clock=lambda: self.now_s
        )

    def next(self, kind: type[Any]) -> Any:
        deadline_s = time.monotonic() + BOUND_S
        while time.monotonic() < deadline_s:
            item = self.inbox.get(timeout=BOUND_S)
            if isinstance(item, kind) or (isinstance(item, tuple) and isinstance(item[1], kind)):
                return item
        raise AssertionError(f"no {kind.__name__} came")


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Callable[[str], Host]]:
    opened: list[Any] = []
    memory = Path(tempfile.mkdtemp(prefix="e-"))  # the path of a socket in it may have 107 bytes

    def make(script: str) -> Host:
        spec = JobSpec(
            job_id="standby",
            directory=tmp_path,
            adapter="multicontroller",
            in_place="proven",
            simulated_faults=False,
            command=(sys.executable, "-c", script),
            service_command=(),
            config=Config(num_slices=1),
            shm_root=memory / "shm",
        )
        spec.shm_root.mkdir()
        save_job(spec)
        lock = JobLock.acquire(spec.job_id, root=spec.shm_root)
        arena = Arena.create(spec.job_id, HostId(0), root=spec.shm_root)
        host = Host(spec, arena.directory)
        socket = WorkerSocket(spec.socket_path(0), host.inbox.put)
        opened.extend([socket.close, arena.unlink, lock.unlink])
        return host

    yield make
    for close in opened:
        close()
    shutil.rmtree(memory)


def prepare(warm: WarmWorker) -> int:
    """Commits until a process is prepared; returns it."""
    for _ in range(CALM_COMMITS):
        warm.committed()
    assert warm.pid is not None
    return warm.pid


def meet(host: Host, warm: WarmWorker) -> FramedSocket:
    assert warm.pid is not None
    low_priority.restore(warm.pid)  # a busy machine would let it wait
    connection, hello = host.next(Hello)
    assert warm.meet(connection, hello)
    return connection


def test_standby_waits_at_its_session_at_low_priority_until_its_turn(make_host: Any) -> None:
    host = make_host(AT_SESSION)
    warm = host.warm()
    pid = prepare(warm)
    assert low_priority.is_lowered(pid)
    connection = meet(host, warm)
    assert warm.is_ready
    assert not (host.spec.directory / "turn").exists()
    taken = warm.take()
    assert taken is not None
    assert taken.process.pid == pid
    assert not low_priority.is_lowered(pid)
    assert warm.pid is None
    connection.send(TakeTurn())
    wait_until(lambda: (host.spec.directory / "turn").exists())
    taken.end(wait=True)
    assert not is_alive(pid)


def test_standby_plays_worlds_alone_and_is_stopped_meanwhile_by_a_recovery(make_host: Any) -> None:
    host = make_host(REHEARSES)
    warm = host.warm(worlds=(solo_world(host.spec.config, 1, 4),))
    pid = prepare(warm)
    connection = meet(host, warm)
    warm.recovering(has_worker=True)
    wait_until(lambda: state_of(pid) == "T")
    prepare(warm)  # calm again
    (host.spec.directory / "go").touch()
    told = host.next(Rehearsed)
    assert told == (connection, Rehearsed(error="one slice"))
    assert warm.hear(*told)
    warm.recovering(has_worker=True)
    assert state_of(pid) != "T"  # it only waits
    assert warm.worlds() == ()  # the next one would fail the same way
    warm.close()


def test_standby_that_dies_in_a_rehearsal_is_followed_by_one_that_has_none(make_host: Any) -> None:
    host = make_host(REHEARSES)
    warm = host.warm(worlds=(solo_world(host.spec.config, 1, 4),))
    pid = prepare(warm)
    meet(host, warm)
    assert warm.worlds()
    os.kill(pid, signal.SIGKILL)
    assert warm.ended(host.next(WorkerExit))
    assert warm.worlds() == ()


def test_standby_is_not_prepared_before_the_world_is_calm_nor_without_being_wanted(make_host: Any) -> None:
    host = make_host(AT_SESSION)
    warm = host.warm()
    for _ in range(CALM_COMMITS - 1):
        warm.committed()
    warm.recovering(has_worker=True)
    warm.committed()
    assert warm.pid is None
    assert warm.take() is None


def test_standby_under_way_is_stopped_while_a_recovery_goes_on(make_host: Any) -> None:
    host = make_host("import time; time.sleep(60)")
    warm = host.warm()
    pid = prepare(warm)
    warm.recovering(has_worker=True)
    wait_until(lambda: state_of(pid) == "T")
    prepare(warm)
    wait_until(lambda: state_of(pid) != "T")
    warm.close()
    assert not is_alive(pid)


def test_standby_that_dies_is_prepared_again_after_growing_pauses(make_host: Any) -> None:
    host = make_host(ENDS)
    warm = host.warm()
    for pause_s in (1.0, 2.0, 4.0):
        pid = prepare(warm)
        low_priority.restore(pid)
        exit_ = host.next(WorkerExit)
        assert exit_.pid == pid
        assert warm.ended(exit_)
        warm.committed()
        assert warm.pid is None
        host.now_s += pause_s * 0.99
        warm.committed()
        assert warm.pid is None
        host.now_s += pause_s * 0.02
    assert not warm.ended(WorkerExit(pid=os.getpid(), status=None))


def test_standby_ends_with_its_agents_connection(make_host: Any) -> None:
    host = make_host(AT_SESSION)
    warm = host.warm()
    pid = prepare(warm)
    meet(host, warm).close()  # as when the agent dies
    wait_until(lambda: not is_alive(pid))
    assert warm.ended(host.next(WorkerExit))


def test_standby_of_an_earlier_agent_is_ended_by_the_next(make_host: Any) -> None:
    host = make_host("import time; time.sleep(60)")
    pid = prepare(host.warm())
    assert (host.directory / WARM_FILE).exists()
    later = host.warm()
    wait_until(lambda: not is_alive(pid))
    assert not (host.directory / WARM_FILE).exists()
    assert later.pid is None
