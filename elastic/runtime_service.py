"""The adapter's runtime service (for multi-controller JAX: its coordination service), one process a
generation.

It lives outside the workers, because its death ends every client. One process is kept warm (its imports
done), so that a new generation waits only for a port. Old ones are kept for some generations: an array of an
old world that user code still holds keeps its client alive, and a client whose service is gone aborts its
process. For the same reason a service outlives its coordinator: the next one adopts it, by its pid and start
time, and watches it through a pidfd.

A service process prints `READY`, reads a line `START <num_processes> <host>`, prints `UP <address>`, and ends
when the launcher is gone (`elastic.leash`); without a launcher, or before it is up, when its input ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic.leash import leash_fd
from elastic.worker_process import is_stopped, start_time

KEPT_GENERATIONS = 4
ATTEMPTS = 3
NUM_WARM = 2
"""One for the next generation, one for a loss in the middle of that."""
STOPPED_S = 0.3
"""How long a service may be stopped (SIGSTOP) before it counts as gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    """A service that runs, as the next coordinator finds it."""

    generation: int
    pid: int
    start_time: int


class _Service:
    """A service process of a generation: started here, or adopted."""

    def __init__(self, generation: int, pid: int, child: subprocess.Popen[str] | None) -> None:
        self.record = ServiceRecord(generation=generation, pid=pid, start_time=start_time(pid))
        self.is_over = False
        """Whether its end is told, or wanted."""
        self._child = child
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self._is_closed = False
        self._stopped_since_s: float | None = None

    def wait_end(self) -> None:
        """Block until it has ended."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.poll()

    def is_stopped(self, now_s: float) -> bool:
        """Whether it has been stopped for too long; to be asked again and again."""
        if not is_stopped(self.record.pid):
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now_s
        return self._stopped_since_s is not None and now_s - self._stopped_since_s >= STOPPED_S

    def end(self) -> None:
        """End it now."""
        self.is_over = True
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._is_closed:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of what has ended."""
        with self._lock:
            self._is_closed = True
            os.close(self._pidfd)
        if self._child is not None:
            with self._child:  # closes its pipes, and takes its status
                pass


class ServicePool:
    """Starts a service for each generation and ends the old ones. Without a command every start is ready at
    once. `on_ready` gets generation and address, `on_lost` generation and cause, both from threads.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        bind_host: str,
        on_ready: Callable[[int, str], None],
        on_lost: Callable[[int, str], None] = lambda generation, cause: None,
    ) -> None:
        self._command = command
        self._bind_host = bind_host
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._running: list[_Service] = []
        self._warm: list[subprocess.Popen[str]] = []
        self._closed = False
        self.refill()

    def start(self, generation: int, num_processes: int) -> None:
        """Start the service of a generation; `on_ready` is called from a thread with its address."""
        if not self._command:
            self._on_ready(generation, "")
            return
        self._warm = [process for process in self._warm if process.poll() is None]
        process = self._warm.pop(0) if self._warm else self._spawn()
        threading.Thread(target=self._serve, args=(process, generation, num_processes), daemon=True).start()

    def pid_of(self, generation: int) -> int:
        """The process that serves a generation, once it is ready; 0 where none is needed."""
        return {record.generation: record.pid for record in self.records()}.get(generation, 0)

    def refill(self) -> None:
        """Warm processes for the next generations; not during a recovery, whose processors it would share."""
        while self._command and len(self._warm) < NUM_WARM:
            self._warm.append(self._spawn())

    def records(self) -> tuple[ServiceRecord, ...]:
        """The services that run, for whoever takes over."""
        return tuple(service.record for service in self._running)

    def adopt(self, records: tuple[ServiceRecord, ...], newest_generation: int) -> None:
        """Take over what another coordinator has started; tells of the newest one if it has ended."""
        for record in records:
            service = None
            with contextlib.suppress(ProcessLookupError):
                service = _Service(record.generation, record.pid, None)
            if service is not None and service.record == record:
                self._keep(service)
            elif record.generation == newest_generation:
                self._on_lost(record.generation, "died while no coordinator was there")

    def look(self) -> None:
        """Find the service that is stopped: it answers nobody. It is not ended, as that ends its clients."""
        now_s = time.monotonic()
        for service in self._running[-1:]:
            if not service.is_over and service.is_stopped(now_s):
                self._lose(service, "is stopped and answers nobody")

    def close(self) -> None:
        """End all services."""
        self._closed = True
        for service in self._running:
            service.end()
        for process in self._warm:
            _end(process)

    def _keep(self, service: _Service) -> None:
        self._running.append(service)
        while len(self._running) > KEPT_GENERATIONS:
            self._running.pop(0).end()
        threading.Thread(target=self._watch, args=(service,), name="service-exit", daemon=True).start()

    def _watch(self, service: _Service) -> None:
        service.wait_end()
        self._lose(service, "died")
        service.close()

    def _lose(self, service: _Service, cause: str) -> None:
        if not service.is_over:
            service.is_over = True
            self._on_lost(service.record.generation, cause)

    def _serve(self, process: subprocess.Popen[str], generation: int, num_processes: int) -> None:
        for attempt in range(ATTEMPTS):
            address = _start_service(process, num_processes, self._bind_host)
            if self._closed:
                break
            if address is not None:
                self._keep(_Service(generation, process.pid, process))
                self._on_ready(generation, address)
                return
            _end(process)
            if attempt + 1 < ATTEMPTS:
                process = self._spawn()  # the one before has died: without a service nothing goes on
        _end(process)

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
