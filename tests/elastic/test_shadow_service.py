"""The runtime service of a shadow group: started, told, ended; one that cannot be started is told too."""

from __future__ import annotations

import queue
import sys

import pytest

from elastic.shadow_service import ShadowService

BOUND_S = 20.0
SERVICE = """
import sys
print("READY", flush=True)
_, num, host = sys.stdin.readline().split()
print(f"UP {host}:{num}", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def told() -> queue.SimpleQueue[tuple[int, str]]:
    return queue.SimpleQueue()


def service(code: str, told: queue.SimpleQueue[tuple[int, str]]) -> ShadowService:
    command = (sys.executable, "-c", code) if code else ()
    return ShadowService(
        command, "127.0.0.1", lambda *one: told.put(one), lambda number: told.put((number, "failed"))
    )


def test_service_tells_its_address_and_ends_when_it_is_told(
    told: queue.SimpleQueue[tuple[int, str]],
) -> None:
    one = service(SERVICE, told)
    one.start(7, 3)
    assert told.get(timeout=BOUND_S) == (7, "127.0.0.1:3")
    process = one._process
    assert process is not None
    one.end()
    assert process.wait(timeout=BOUND_S) == -9


def test_service_that_ends_is_told(told: queue.SimpleQueue[tuple[int, str]]) -> None:
    service("raise SystemExit(1)", told).start(2, 1)
    assert told.get(timeout=BOUND_S) == (2, "failed")


def test_group_without_a_service_has_an_empty_address(told: queue.SimpleQueue[tuple[int, str]]) -> None:
    service("", told).start(1, 2)
    assert told.get(timeout=BOUND_S) == (1, "")
