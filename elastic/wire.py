"""Messages between processes: frozen values as msgpack with their type's name, and frames on a stream
socket.

Only the types listed where a `Codec` is made can be decoded; nothing is executed (no pickle crosses a
trust boundary).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from reshard.errors import ElasticError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
READ_BYTES = 1 << 20
"""As much of a frame at a time: memory grows with what has come, not with what was announced."""


class WireError(ElasticError):
    """A message that cannot be understood, or a frame that is too large."""

    kind = "wire"
    remedy = "Both sides must run the same version of elastic-slices."


class Codec:
    """Encodes and decodes the values of the given dataclasses, each under its class's name."""

    def __init__(self, types: Iterable[type[Any]]) -> None:
        self._types = {kind.__name__: kind for kind in types}

    def encode(self, value: Any) -> tuple[str, bytes]:
        """Return the type's name and the fields. Raises WireError for a type that is not listed."""
        name = type(value).__name__
        if self._types.get(name) is not type(value):
            raise WireError(f"{name} is no message of this protocol")
        return name, msgspec.msgpack.encode(value)

    def decode(self, name: str, body: bytes) -> Any:
        """Return the value. Raises WireError for an unknown type or fields that do not fit."""
        kind = self._types.get(name)
        if kind is None:
            raise WireError(f"unknown message {name!r}")
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"{name} cannot be read: {error}") from error


class FramedSocket:
    """Values over a connected stream socket; `send` may be called from several threads, `receive` from
    one.
    """

    def __init__(self, connection: socket.socket, codec: Codec) -> None:
        self._socket = connection
        self._codec = codec
        self._lock = threading.Lock()

    def send(self, value: Any) -> None:
        """Send one value. Raises OSError when the other side is gone."""
        name, body = self._codec.encode(value)
        head = name.encode()
        frame = _LENGTH.pack(1 + len(head) + len(body)) + bytes([len(head)]) + head + body
        with self._lock:
            self._socket.sendall(frame)

    def receive(self, *, max_bytes: int = MAX_FRAME_BYTES, within_s: float | None = None) -> Any | None:
        """Return the next value, None at the end of the stream.

        Raises OSError (TimeoutError when it is not there after `within_s`), WireError for what is no value of
        this protocol or larger than `max_bytes`.
        """
        until_s = None if within_s is None else time.monotonic() + within_s
        prefix = self._read(_LENGTH.size, until_s)
        if prefix is None:
            return None
        (length,) = _LENGTH.unpack(prefix)
        if not 1 < length <= max_bytes:
            raise WireError(f"a frame of {length} bytes")
        frame = self._read(length, until_s)
        if frame is None:
            return None
        name_end = 1 + frame[0]
        return self._codec.decode(frame[1:name_end].decode(errors="replace"), frame[name_end:])

    def close(self) -> None:
        """Close the socket; a blocked `receive` returns."""
        with contextlib.suppress(OSError):  # already disconnected: there is nothing left to shut down
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int, until_s: float | None) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            if until_s is not None:
                self._socket.settimeout(max(until_s - time.monotonic(), 1e-3))
            try:
                part = self._socket.recv(min(count - len(parts), READ_BYTES))
            except ConnectionResetError:
                return None
            if not part:
                return None
            parts += part
        if until_s is not None:
            self._socket.settimeout(None)
        return bytes(parts)
