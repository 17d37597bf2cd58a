"""The adapter's runtime service (for multi-controller JAX: its coordination service), one process a
generation.

It lives outside the workers, because its death ends every client. One process is kept warm (its imports
done), so that a new generation waits only for a port. Old ones are kept for some generations: an array of an
old world that user code still holds keeps its client alive, and a client whose service is gone aborts its
process.

A service process prints `READY`, reads a line `START <num_processes> <host>`, prints `UP <address>`, and ends
when its input does.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable

from elastic.leash import leash_fd

KEPT_GENERATIONS = 4
ATTEMPTS = 3
NUM_WARM = 2
"""One for the next generation, one for a loss in the middle of that."""


class ServicePool:
    """Starts a service for each generation and ends the old ones. Without a command every start is ready at
    once.
    """

    def __init__(
        self, command: tuple[str, ...], bind_host: str, on_ready: Callable[[int, str], None]
    ) -> None:
        self._command = command
        self._bind_host = bind_host
        self._on_ready = on_ready
        self._running: list[subprocess.Popen[str]] = []
        self._warm: list[subprocess.Popen[str]] = []
        self._closed = False
        self._pids: dict[int, int] = {}
        self.refill()

    def start(self, generation: int, num_processes: int) -> None:
        """Start the service of a generation; `on_ready` is called from a thread with its address."""
        if not self._command:
            self._on_ready(generation, "")
            return
        self._warm = [process for process in self._warm if process.poll() is None]
        process = self._warm.pop(0) if self._warm else self._spawn()
        self._running.append(process)
        while len(self._running) > KEPT_GENERATIONS:
            _end(self._running.pop(0))
        threading.Thread(target=self._serve, args=(process, generation, num_processes), daemon=True).start()

    def pid_of(self, generation: int) -> int:
        """The process that serves a generation, once it is ready; 0 where none is needed."""
        return self._pids.get(generation, 0)

    def refill(self) -> None:
        """Warm processes for the next generations; not during a recovery, whose processors it would share."""
        while self._command and len(self._warm) < NUM_WARM:
            self._warm.append(self._spawn())

    def close(self) -> None:
        """End all services."""
        self._closed = True
        for process in [*self._running, *self._warm]:
            _end(process)

    def _serve(self, process: subprocess.Popen[str], generation: int, num_processes: int) -> None:
        for attempt in range(ATTEMPTS):
            address = _start_service(process, num_processes, self._bind_host)
            if address is not None:
                self._pids[generation] = process.pid
                self._on_ready(generation, address)
                return
            if attempt + 1 < ATTEMPTS and not self._closed:
                process = self._spawn()  # the one before has died: without a service nothing goes on
                self._running.append(process)

    def _spawn(self) -> subprocess.Popen[str]:
        leash = leash_fd()
        return subprocess.Popen(
            self._command,
            pass_fds=() if leash is None else (leash,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )


def _start_service(process: subprocess.Popen[str], num_processes: int, bind_host: str) -> str | None:
    """The address of the service that the process has started; None when it died instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdout.readline().strip() != "READY":
        return None
    try:
        process.stdin.write(f"START {num_processes} {bind_host}\n")
        process.stdin.flush()
    except OSError:
        return None
    answer = process.stdout.readline().split()
    return answer[1] if len(answer) == 2 and answer[0] == "UP" else None


def _end(process: subprocess.Popen[str]) -> None:
    with process:  # closes its pipes and waits for its end
        process.kill()
