"""The runtime service of a shadow group: one process while there is a group, at low priority.

It speaks as `elastic.runtime_service` says. It is none of that module's pool: its services belong to worlds
and are kept for some generations.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable

from elastic import low_priority
from elastic.leash import leash_fd


class ShadowService:
    """For the coordinator's one thread; `on_ready(number, address)` or `on_failed(number)` is called from
    another.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        bind_host: str,
        on_ready: Callable[[int, str], None],
        on_failed: Callable[[int], None],
    ) -> None:
        self._command = command
        self._bind_host = bind_host
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._process: subprocess.Popen[str] | None = None

    def start(self, number: int, num_processes: int) -> None:
        """Start the service of a group; the one before is ended."""
        self.end()
        if not self._command:
            self._on_ready(number, "")
            return
        leash = leash_fd()
        process = self._process = subprocess.Popen(
            self._command,
            pass_fds=() if leash is None else (leash,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        low_priority.lower_less(process.pid)
        threading.Thread(
            target=self._serve, args=(process, number, num_processes), name="shadow-service", daemon=True
        ).start()

    def end(self) -> None:
        """End the service."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # the thread that speaks with it waits for its end

    def _serve(self, process: subprocess.Popen[str], number: int, num_processes: int) -> None:
        with contextlib.suppress(OSError), process:  # its input must stay open for as long as it lives
            address = self._speak(process, num_processes)
            if address is not None:
                self._on_ready(number, address)
                process.wait()
                return
        self._on_failed(number)

    def _speak(self, process: subprocess.Popen[str], num_processes: int) -> str | None:
        """The address of the service; None when it ended instead."""
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline().strip() != "READY":
            return None
        process.stdin.write(f"START {num_processes} {self._bind_host}\n")
        process.stdin.flush()
        answer = process.stdout.readline().split()
        return answer[1] if len(answer) == 2 and answer[0] == "UP" else None
