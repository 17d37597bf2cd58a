"""The runtime service of each generation: kept warm, and replaced when it dies before it serves."""

from __future__ import annotations

import queue
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.runtime_service import ServicePool

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


def test_pool_without_a_command_is_ready_at_once(ready: queue.SimpleQueue[tuple[int, str]]) -> None:
    pool = ServicePool((), "host", lambda *found: ready.put(found))
    pool.start(1, 2)
    assert ready.get_nowait() == (1, "")
    pool.close()
