"""What goes over a data-plane connection: requests, heads, trailers; and how its sockets are set up.

    → length (u32), ReadRequest as MessagePack
    ← for each want a head: status, what the checksum covers, mark, bytes of a text, bytes of the box
      then the text (it says why the status is not OK), or the bytes asked for and a trailer: status, mark,
      checksum

Everything is little-endian. Bytes are a box's elements in C order. The trailer comes after the bytes, so it
can say that they were overwritten while they were sent.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from reshard.boxes import Box
from reshard.errors import UsageError

MAX_REQUEST_BYTES = 8 << 20
MAX_TEXT_BYTES = 1 << 16
SOCKET_BUFFER_BYTES = 4 << 20
"""Of both sides on loopback, where the kernel's limits allow it."""
USER_TIMEOUT_S = 10.0
"""How long sent bytes may stay unacknowledged: a host that is gone is noticed then."""

MARK = 0xE1A5
"""Stands in heads and trailers: a stream that is out of step is noticed."""

HEAD = struct.Struct("<BBHIQ")
TRAILER = struct.Struct("<BxH4xQ")
_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")


class Status(enum.IntEnum):
    """The answer to one want; in a trailer, OK or OVERWRITTEN."""

    OK = 0
    STALE = 1
    MISSING = 2
    CORRUPT = 3
    NOT_YET = 4
    OVERWRITTEN = 5
    BAD_REQUEST = 6


class Covers(enum.IntEnum):
    """What a trailer's checksum is of: the whole box, or the range that was asked for."""

    BOX = 0
    RANGE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRange:
    """Bytes [start, stop) of a box, of which the first `skip` have already arrived.

    With `verify` the server reads and checks its copy before it sends anything of it.
    """

    path: str
    box: Box
    start: int
    stop: int
    skip: int = 0
    verify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Ranges of the snapshot of `step`, captured in `of_generation` (None: any)."""

    generation: int
    step: int
    of_generation: int | None
    wants: tuple[WantedRange, ...]


class ProtocolError(OSError):
    """The other side does not speak the data plane's protocol, or speaks another version."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ReadRequest)


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`. Raises UsageError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{address!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def tune(connection: socket.socket, *, loopback: bool) -> None:
    """Set up a socket for bulk transfer, before it connects or listens. What is not allowed is left as it
    is.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(USER_TIMEOUT_S * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(USER_TIMEOUT_S / 2))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    if not loopback:
        return  # the kernel grows the buffers of a real network as it needs them, unless they were set
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _kernel_limit(limit) >= SOCKET_BUFFER_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    for algorithm in (b"cubic", b"reno"):  # nothing to be fair to; pacing only costs
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
            break


@functools.cache
def _kernel_limit(name: str) -> int:
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except (OSError, ValueError):
        return 0


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, by its name alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Bound each wait of `connection`.

    A plain socket keeps blocking, with the kernel's own timers: one call then fills a whole block.
    """
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    seconds = max(seconds, 1e-3)
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def receive_some(connection: socket.socket, into: memoryview) -> int:
    """Fill as much of `into` as one call can; at least a byte. Raises OSError at the end or after the
    timeout.
    """
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    try:
        num = connection.recv_into(into, len(into), flags)
    except BlockingIOError:
        raise TimeoutError("nothing has come for too long") from None
    if num == 0:
        raise ConnectionResetError("the connection was closed")
    return num


def receive(connection: socket.socket, num_bytes: int, until_s: float | None = None) -> bytearray:
    """Return exactly so many bytes. Raises OSError, also when they are not there at `until_s` (monotonic)."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the other side was too slow")
            set_timeout(connection, left_s)
        view = view[receive_some(connection, view) :]
    return data


def send(connection: socket.socket, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
    """Send all of `data`; `more` follows at once. Raises OSError, also when nothing was taken for the
    timeout.
    """
    flags = socket.MSG_MORE if more and not isinstance(connection, ssl.SSLSocket) else 0
    view = memoryview(data)
    while view:
        try:
            view = view[connection.send(view, flags) :]
        except BlockingIOError:
            raise TimeoutError("nothing was taken for too long") from None


def send_request(connection: socket.socket, request: ReadRequest) -> None:
    """Send a request. Raises UsageError when it is too large, OSError."""
    body = _encoder.encode(request)
    if len(body) > MAX_REQUEST_BYTES:
        raise UsageError(f"a request of {len(body)} bytes is above {MAX_REQUEST_BYTES}: ask for fewer boxes")
    send(connection, _LENGTH.pack(len(body)) + body)


def receive_request(connection: socket.socket) -> ReadRequest:
    """Return the next request. Raises OSError at the end, or for what is none."""
    (num_bytes,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
    if not 0 < num_bytes <= MAX_REQUEST_BYTES:
        raise ProtocolError(f"a request of {num_bytes} bytes")
    try:
        return _decoder.decode(receive(connection, num_bytes))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a request: {error}") from error


def receive_head(connection: socket.socket) -> tuple[int, int, int, int]:
    """Return status, what the checksum covers, bytes of the text that follows, bytes of the box."""
    status, covers, mark, text_bytes, box_bytes = HEAD.unpack(receive(connection, HEAD.size))
    if mark != MARK or text_bytes > MAX_TEXT_BYTES:
        raise ProtocolError("not an answer of the data plane")
    return status, covers, text_bytes, box_bytes


def receive_trailer(connection: socket.socket) -> tuple[int, int]:
    """Return status and checksum."""
    status, mark, digest = TRAILER.unpack(receive(connection, TRAILER.size))
    if mark != MARK:
        raise ProtocolError("not an answer of the data plane")
    return status, digest


def error_head(status: Status, text: str) -> bytes:
    """Return the head that refuses a want, with the text that says why."""
    encoded = text.encode()[:MAX_TEXT_BYTES]
    return HEAD.pack(status, 0, MARK, len(encoded), 0) + encoded
