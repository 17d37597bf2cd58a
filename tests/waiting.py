"""Waiting for a condition within a bound, and what the kernel says of a process; for tests of any folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(
    condition: Callable[[], object], otherwise: str = "not in time", *, within_s: float = 10.0
) -> None:
    """Return as soon as the condition holds; fails after `within_s`."""
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, otherwise
        threading.Event().wait(0.01)


def state_of(pid: int) -> str:
    """The state of a process as in proc(5): "T" is stopped; "Z", ended and not waited for; "", not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    return state_of(pid) not in ("", "Z")
