"""Faults by signals: to one process, or to all of a host at once.

A process is held by a pidfd from the moment it is struck to its healing, so that no other process that got
its number meanwhile is ever hit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from chaos.faults import Fault
from chaos.targets import Targets
from elastic.members import member_of
from reshard.ids import HostId

Heal = Callable[[], None]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


def find_pid(targets: Targets, fault: Fault, target: HostId | None) -> int | None:
    """The process that the fault is for."""
    if target is None:
        return targets.coordinator_pid() if fault.role == "coordinator" else targets.service_pid()
    find = {"slice": targets.worker_pid, "agent": targets.agent_pid, "spare": targets.spare_pid}
    return find[fault.role](member_of(target, targets.hosts_per_slice))


def strike(targets: Targets, fault: Fault, target: HostId | None) -> Heal | None:
    """Let the fault happen to one of its targets; returns what heals it, None when nothing was hit."""
    if fault.kind == "host":
        assert target is not None
        return _nothing if _end_host(targets, member_of(target, targets.hosts_per_slice)) else None
    pid = find_pid(targets, fault, target)
    if pid is None:
        return None
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        signal.pidfd_send_signal(process, SIGNALS[fault.kind])
    except ProcessLookupError:
        os.close(process)
        return None

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):  # it was ended meanwhile
            signal.pidfd_send_signal(process, signal.SIGCONT)
        os.close(process)

    if fault.kind == "stop" and fault.heal_s is not None:
        return go_on
    os.close(process)
    return _nothing


def process_tree(pid: int) -> list[int]:
    """A process and all below it, parents first; those that end meanwhile are left out."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _end_host(targets: Targets, member: int) -> bool:
    roots = (
        targets.agent_pid(member),
        targets.worker_pid(member),
        targets.spare_pid(member),
    )
    struck = False
    pids = dict.fromkeys(pid for root in roots if root is not None for pid in process_tree(root))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            struck = True
    shutil.rmtree(targets.arena(member), ignore_errors=True)
    return struck


def _nothing() -> None:
    """What needs no healing."""
