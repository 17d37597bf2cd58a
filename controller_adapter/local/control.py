"""From the launcher into the training process: faults to simulate, records to write down, the wish to stop.

A socket pair that the process inherits: it has no name that others could find, and leaves nothing behind.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic.events import StopRequested
from elastic.records import FaultInjected
from elastic.wire import Codec, FramedSocket, WireError
from reshard.errors import ElasticError

if TYPE_CHECKING:
    from controller_adapter.local.engine import LocalEngine

ENV_CONTROL_FD = "ELASTIC_LOCAL_CONTROL_FD"
ACKNOWLEDGE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate:
    """Let a fault happen to these slices at once."""

    kind: str
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """The answer to all but StopRequested."""

    error: str = ""


CODEC = Codec((Simulate, FaultInjected, StopRequested, Acknowledged))


class ControlClient:
    """The launcher's end. `ask` may be called from several threads."""

    def __init__(self) -> None:
        own, self.child_end = socket.socketpair()
        own.settimeout(ACKNOWLEDGE_S)
        self._socket = FramedSocket(own, CODEC)
        self._lock = threading.Lock()

    def ask(self, message: Simulate | FaultInjected) -> str:
        """Send, wait for the acknowledgement, return its error.

        Raises OSError when the process has ended or does not answer.
        """
        with self._lock:
            self._socket.send(message)
            answer = self._socket.receive()
        if not isinstance(answer, Acknowledged):
            raise ConnectionResetError("the training process has ended")
        return answer.error

    def stop(self, reason: str) -> None:
        """Ask the job to end. Raises OSError when the process has ended."""
        self._socket.send(StopRequested(reason=reason))

    def close(self) -> None:
        """Close both ends."""
        self._socket.close()
        self.child_end.close()


def inherited() -> socket.socket | None:
    """The training process's end, None without a launcher; its own children do not inherit it."""
    value = os.environ.pop(ENV_CONTROL_FD, None)
    if value is None:
        return None
    connection = socket.socket(fileno=int(value))
    connection.set_inheritable(False)
    return connection


def serve(connection: socket.socket, engine: LocalEngine) -> threading.Thread:
    """Hand on to the engine what the launcher sends, from a thread that runs until the connection ends."""
    framed = FramedSocket(connection, CODEC)
    thread = threading.Thread(target=_serve, args=(framed, engine), name="local-control", daemon=True)
    thread.start()
    return thread


def _serve(framed: FramedSocket, engine: LocalEngine) -> None:
    try:
        while (message := framed.receive()) is not None:
            if isinstance(message, StopRequested):
                engine.stop(message.reason)
            else:
                framed.send(Acknowledged(error=_hand_on(message, engine)))
    except (OSError, WireError):
        pass  # the launcher is gone, or no launcher of ours: the leash ends the process
    finally:
        framed.close()


def _hand_on(message: Simulate | FaultInjected, engine: LocalEngine) -> str:
    if isinstance(message, FaultInjected):
        engine.write(message)
        return ""
    try:
        engine.inject(message.kind, message.slices)
    except ElasticError as error:
        return str(error)
    return ""
