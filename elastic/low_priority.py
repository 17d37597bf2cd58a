"""Running another process at the lowest priority, such that it can be raised again without privileges.

What `nice` lowers only a privileged process can raise, and so it is with SCHED_IDLE (sched(7)). SCHED_BATCH
can always be undone, and so can the nice value of an autogroup, the kernel's scheduling group of a session:
the process must lead a session of its own. SCHED_IDLE is taken where undoing it was tried and works.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from pathlib import Path

LOWEST = 19
LOW, LESS_LOW = 10, 5
"""A tenth, and a third, of what a process of normal priority gets where both want to run all the time."""
NORMAL = 0
WRITES_S, WRITE_EVERY_S = 5.0, 0.05
"""The kernel takes ten changes of autogroups in a second from all processes without privileges."""
ROUNDS = 3

_lock = threading.Lock()
_wanted: dict[int, int] = {}
"""The nice value of a process's autogroup that is still to be set."""


def lower(pid: int) -> None:
    """Let a process run only when nobody else wants to; its threads and children inherit it."""
    _set_policy(pid, os.SCHED_IDLE if can_undo_idle() else os.SCHED_BATCH)
    _set_group(pid, LOWEST)


def lower_less(pid: int, nice: int = LOW) -> None:
    """Give a process that was lowered a small share also where others want to run all the time."""
    _set_policy(pid, os.SCHED_BATCH)
    _set_group(pid, nice)


def restore(pid: int) -> None:
    """Let a process that was lowered run as any other again."""
    _set_policy(pid, os.SCHED_OTHER)
    _set_group(pid, NORMAL)


def is_lowered(pid: int) -> bool:
    """Whether a process runs below the normal priority."""
    return os.sched_getscheduler(pid) != os.SCHED_OTHER


@functools.cache
def can_undo_idle() -> bool:
    """Whether a thread of this process gets out of SCHED_IDLE again; tried in one that ends then."""
    undone: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            undone.append(True)

    thread = threading.Thread(target=attempt, name="priority")
    thread.start()
    thread.join()
    return bool(undone)


def _set_policy(pid: int, policy: int) -> None:
    """Set the policy of all threads; in rounds, as one may start another meanwhile."""
    for _ in range(ROUNDS):
        changed = False
        with contextlib.suppress(OSError):  # the process has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):  # the thread has ended
                    if os.sched_getscheduler(int(task.name)) != policy:
                        os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
                        changed = True
        if not changed:
            return


def _set_group(pid: int, nice: int) -> None:
    """Set the nice value of the process's autogroup; in a thread where the kernel wants to be asked later."""
    with _lock:
        _wanted[pid] = nice
    if not _try_group(pid):
        threading.Thread(target=_keep_trying, args=(pid,), name="priority", daemon=True).start()


def _keep_trying(pid: int) -> None:
    deadline_s = time.monotonic() + WRITES_S
    while not _try_group(pid) and time.monotonic() < deadline_s:
        time.sleep(WRITE_EVERY_S)


def _try_group(pid: int) -> bool:
    """Set what is wanted by now; False when the kernel wants to be asked later."""
    with _lock:
        nice = _wanted.get(pid)
        try:
            if nice is not None and os.getsid(pid) == pid:
                Path(f"/proc/{pid}/autogroup").write_text(f"{nice}\n")
        except BlockingIOError:
            return False
        except OSError:
            pass  # no autogroups in this kernel, or the process has ended
        _wanted.pop(pid, None)
        return True
