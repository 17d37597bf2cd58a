"""The unix socket on which an agent's worker connects: accepts, reads frames, hands them on with their
connection.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.protocol import WORKER_CODEC
from elastic.wire import FramedSocket, WireError


class WorkerSocket:
    """Listens at `path` (0600); calls `on_message((connection, message))` from a thread for each
    connection.
    """

    def __init__(self, path: Path, on_message: Callable[[tuple[FramedSocket, Any]], None]) -> None:
        self._path = path
        self._on_message = on_message
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous_mask = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(previous_mask)
        self._listener.listen(4)
        threading.Thread(target=self._accept, name="worker-socket", daemon=True).start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            framed = FramedSocket(connection, WORKER_CODEC)
            threading.Thread(target=self._read, args=(framed,), daemon=True).start()

    def _read(self, connection: FramedSocket) -> None:
        try:
            while (message := connection.receive()) is not None:
                self._on_message((connection, message))
        except (OSError, WireError):
            connection.close()
