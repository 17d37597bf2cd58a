"""Processes that the kernel ends with the process that started them, also when they are stopped; until they
are told to outlive it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_THEN_RUN = (
    "import ctypes, os, sys\n"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)\n"
    "if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])\n"  # else it died before
)


def dying_with_parent(command: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs `command` in the same process, which ends with the calling *thread*."""
    return (sys.executable, "-I", "-S", "-c", _THEN_RUN, str(os.getpid()), *command)


def outlive_parent() -> None:
    """In such a process: from now on live on when the parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
