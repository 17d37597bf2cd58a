"""The runtime service of each generation: kept warm, and replaced when it dies before it serves."""

from __future__ import annotations

import os
import queue
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.runtime_service import ServicePool, ServiceRecord
from elastic.worker_process import start_time

BOUND_S = 20.0
SERVICE = """
    import os, pathlib, sys
    lives = pathlib.Path(sys.argv[1])
    print("READY", flush=True)
    words = sys.stdin.readline().split()
    if not words:
        sys.exit()
    if lives.exists():
        lives.unlink()
        os._exit(1)  # dies instead of serving, once
    print("UP", f"{words[2]}:{words[1]}", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def ready() -> queue.SimpleQueue[tuple[int, str]]:
    return queue.SimpleQueue()


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    return tmp_path / "dies-once"


@pytest.fixture
def pool(tmp_path: Path, fragile: Path, ready: queue.SimpleQueue[tuple[int, str]]) -> Iterator[ServicePool]:
    script = tmp_path / "service.py"
    script.write_text(textwrap.dedent(SERVICE))
    made = ServicePool((sys.executable, str(script), str(fragile)), "host", lambda *found: ready.put(found))
    yield made
    made.close()


def test_service_tells_its_address(pool: ServicePool, ready: queue.SimpleQueue[tuple[int, str]]) -> None:
    pool.start(4, 3)
    assert ready.get(timeout=BOUND_S) == (4, "host:3")


def test_service_that_dies_before_it_serves_is_replaced(
    pool: ServicePool, fragile: Path, ready: queue.SimpleQueue[tuple[int, str]]
) -> None:
    fragile.touch()
    pool.start(4, 3)
    assert ready.get(timeout=BOUND_S) == (4, "host:3")
    assert not fragile.exists()


def test_many_generations_need_no_refill_in_between(
    pool: ServicePool, ready: queue.SimpleQueue[tuple[int, str]]
) -> None:
    for generation in range(1, 8):
        pool.start(generation, 2)
        assert ready.get(timeout=BOUND_S) == (generation, "host:2")


def test_running_service_is_adopted_by_the_next_pool_which_hears_of_its_end(
    pool: ServicePool, ready: queue.SimpleQueue[tuple[int, str]]
) -> None:
    pool.start(4, 3)
    assert ready.get(timeout=BOUND_S) == (4, "host:3")
    records = pool.records()
    assert [record.generation for record in records] == [4]
    lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    second = ServicePool((), "host", lambda *found: None, lambda *found: lost.put(found))
    second.adopt(records, 4)
    assert second.records() == records
    os.kill(records[0].pid, signal.SIGKILL)
    assert lost.get(timeout=BOUND_S) == (4, "died")


def test_service_that_died_while_nobody_watched_is_told_and_another_process_is_not_taken_for_it(
    pool: ServicePool, ready: queue.SimpleQueue[tuple[int, str]]
) -> None:
    ours = ServiceRecord(generation=4, pid=os.getpid(), start_time=1)
    lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    second = ServicePool((), "host", lambda *found: None, lambda *found: lost.put(found))
    second.adopt((replace(ours, generation=3), ours), 4)
    assert lost.get_nowait() == (4, "died while no coordinator was there")
    assert lost.empty()
    assert second.records() == ()


def test_stopped_service_is_told_once_and_left_alone(tmp_path: Path, fragile: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(textwrap.dedent(SERVICE))
    ready: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    command = (sys.executable, str(script), str(fragile))
    pool = ServicePool(command, "host", lambda *found: ready.put(found), lambda *found: lost.put(found))
    pool.start(1, 2)
    ready.get(timeout=BOUND_S)
    (record,) = pool.records()
    os.kill(record.pid, signal.SIGSTOP)
    waiting = threading.Event()
    deadline_s = time.monotonic() + BOUND_S
    while lost.empty():
        assert time.monotonic() < deadline_s
        pool.look()
        waiting.wait(0.02)
    assert lost.get() == (1, "is stopped and answers nobody")
    pool.look()
    assert start_time(record.pid) == record.start_time
    pool.close()
    assert lost.empty()


def test_pool_without_a_command_is_ready_at_once(ready: queue.SimpleQueue[tuple[int, str]]) -> None:
    pool = ServicePool((), "host", lambda *found: ready.put(found))
    pool.start(1, 2)
    assert ready.get_nowait() == (1, "")
    pool.close()
