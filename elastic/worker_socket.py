"""The unix socket on which an agent's worker connects: accepts, reads frames, hands them on with their
connection.

Who connects is known to the kernel: it must be a process of our own user, the one that it says it is. Before
it has said so it may send only little, and soon.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.protocol import WORKER_CODEC, Hello
from elastic.refusals import RefusalTally
from elastic.wire import FramedSocket, WireError

SOCKET_MODE = 0o600
HELLO_BYTES = 4096
HELLO_S = 5.0
"""How long who has connected may take to say who it is."""
MAX_STRANGERS = 8
"""Connections that have not said who they are; beyond them nobody is taken in."""
_CREDENTIALS = struct.Struct("3i")


class WorkerSocket:
    """Listens at `path` (0600); calls `on_message((connection, message))` from a thread for each
    connection. Callers that are refused are counted in `refused`.
    """

    def __init__(
        self,
        path: Path,
        on_message: Callable[[tuple[FramedSocket, Any]], None],
        refused: RefusalTally | None = None,
    ) -> None:
        self._path = path
        self._on_message = on_message
        self._refused = refused or RefusalTally()
        self._lock = threading.Lock()
        self._num_strangers = 0
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Linux makes the file with the mode of the socket: it never is there with another one. A umask would
        # hold for the files of other threads, too.
        os.fchmod(self._listener.fileno(), SOCKET_MODE)
        self._listener.bind(str(path))
        self._listener.listen(4)
        threading.Thread(target=self._accept, name="worker-socket", daemon=True).start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def refuse(self, connection: FramedSocket, reason: str, pid: int) -> None:
        """Close a connection, and count that it was refused."""
        self._refused.count("worker-socket", reason, f"pid {pid}")
        connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            framed = FramedSocket(connection, WORKER_CODEC)
            pid, user = _peer(connection)
            if user != os.geteuid():
                self.refuse(framed, "unknown-sender", pid)
                continue
            with self._lock:
                is_full = self._num_strangers >= MAX_STRANGERS
                self._num_strangers += not is_full
            if is_full:
                self.refuse(framed, "too-many", pid)
                continue
            threading.Thread(target=self._serve, args=(framed, pid), daemon=True).start()

    def _serve(self, connection: FramedSocket, pid: int) -> None:
        try:
            hello = self._meet(connection, pid)
        finally:
            with self._lock:
                self._num_strangers -= 1
        try:
            message: Any = hello
            while message is not None:
                self._on_message((connection, message))
                message = connection.receive()
        except WireError:
            self.refuse(connection, "bad-message", pid)
        except OSError:
            connection.close()

    def _meet(self, connection: FramedSocket, pid: int) -> Hello | None:
        """The first message of a process that says who it is; else None, the connection closed."""
        try:
            hello = connection.receive(max_bytes=HELLO_BYTES, within_s=HELLO_S)
        except TimeoutError:
            self.refuse(connection, "too-slow", pid)
        except WireError:
            self.refuse(connection, "bad-message", pid)
        except OSError:
            connection.close()  # it has gone
        else:
            if isinstance(hello, Hello) and hello.pid == pid:
                return hello
            if hello is None:
                connection.close()
            else:
                self.refuse(connection, "unknown-sender", pid)
        return None


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as they were when it connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user
