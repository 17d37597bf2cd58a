"""The leash: a pipe whose writing end only the launcher holds, so that its death, of whatever kind, ends
what it started.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from elastic.job import ENV_LEASH_FD


def leash_fd() -> int | None:
    """The inherited reading end, None for a process without a launcher."""
    value = os.environ.get(ENV_LEASH_FD)
    return int(value) if value else None


def watch_leash(on_cut: Callable[[], None]) -> None:
    """Call `on_cut` from a thread when the launcher is gone; does nothing without a leash."""
    descriptor = leash_fd()
    if descriptor is None:
        return

    def wait_cut() -> None:
        while os.read(descriptor, 1):
            pass  # nothing is ever written: only the end of the pipe counts
        on_cut()

    threading.Thread(target=wait_cut, name="elastic-leash", daemon=True).start()
