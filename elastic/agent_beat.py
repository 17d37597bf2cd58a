"""The agent's heartbeat to the coordinator, from a thread of its own.

The agent's one deciding thread may be busy for seconds: it makes room for snapshots of many gigabytes, or
waits for a large process to end. That is no death, and must not look like one to a bound below a second. A
thread that does not come back from such work within `stuck_s` is one: then the heartbeat stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Beat:
    """Calls `send` every `every_s` from a thread, as long as `turned` is called at least every `stuck_s`."""

    def __init__(
        self,
        send: Callable[[], None],
        every_s: float,
        stuck_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._every_s = every_s
        self._stuck_s = stuck_s
        self._clock = clock
        self._turned_s = clock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to beat."""
        threading.Thread(target=self._run, name="agent-beat", daemon=True).start()

    def turned(self) -> None:
        """The deciding thread has come round again."""
        self._turned_s = self._clock()

    def beat(self) -> bool:
        """Beat once, unless the deciding thread is stuck; whether it did."""
        is_alive = self._clock() - self._turned_s <= self._stuck_s
        if is_alive:
            self._send()
        return is_alive

    def close(self) -> None:
        """Stop."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self.beat()
