"""A process that stands by ends with its parent even if it is stopped, and lives on once it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import waiting
from waiting import is_alive

from elastic.worker_process import start_time

wait_until = partial(waiting.wait_until, within_s=20.0)
PARENT = """
import subprocess, sys
from elastic.parent_death import dying_with_parent
child = subprocess.Popen(dying_with_parent([sys.executable, "-c", sys.argv[1]]))
print(child.pid, flush=True)
sys.stdin.read()
"""


def start_parent(code: str) -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def kill(parent: subprocess.Popen[str]) -> None:
    with parent:
        parent.kill()


def test_stopped_process_ends_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    parent, child = start_parent(f"open({str(ready)!r}, 'w'); import time; time.sleep(60)")
    wait_until(ready.exists)
    os.kill(child, signal.SIGSTOP)
    kill(parent)
    wait_until(lambda: not is_alive(child))


def test_process_that_was_told_to_outlives_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "from elastic.parent_death import outlive_parent; outlive_parent()\n"
        f"open({str(ready)!r}, 'w'); import time; time.sleep(60)"
    )
    parent, child = start_parent(code)
    wait_until(ready.exists)
    began = start_time(child)
    kill(parent)
    assert is_alive(child)
    assert start_time(child) == began
    os.kill(child, signal.SIGKILL)
