"""Sending what was found: files by `sendfile`, cut pieces block by block, small things together."""

from __future__ import annotations

import os
import socket
import ssl
from typing import cast

import xxhash

from snapshot.dataplane_find import Found
from snapshot.dataplane_slots import hash_range
from snapshot.dataplane_wire import Covers, send

BLOCK_BYTES = 1 << 20
_SENDFILE_BYTES = 16 << 20
_GATHER_BYTES = 64 << 10


class Outlet:
    """The sending end of a connection: gathers what is small, so that it goes out in one call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._gathered = bytearray()
        self._block: bytearray | None = None

    def put(self, data: bytes | memoryview) -> None:
        """Send these bytes, at the latest at `flush`."""
        if len(data) < _GATHER_BYTES:
            self._gathered += data
            if len(self._gathered) >= _GATHER_BYTES:
                self.flush(more=True)
        else:
            self.flush(more=True)
            send(self._connection, data, more=True)

    def put_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Send bytes of a file; without TLS they are not copied here. Raises OSError when it ends before."""
        if nbytes < _GATHER_BYTES or isinstance(self._connection, ssl.SSLSocket):
            self._block = self._block or bytearray(BLOCK_BYTES)
            while nbytes:
                got = os.preadv(fd, [memoryview(self._block)[: min(nbytes, BLOCK_BYTES)]], offset)
                if got == 0:
                    raise OSError("the slot became shorter while it was sent")
                self.put(memoryview(self._block)[:got])
                offset, nbytes = offset + got, nbytes - got
            return
        self.flush(more=True)
        while nbytes:
            try:
                sent = os.sendfile(self._connection.fileno(), fd, offset, min(nbytes, _SENDFILE_BYTES))
            except BlockingIOError:
                raise TimeoutError("nothing was taken for too long") from None
            if sent == 0:
                raise OSError("the slot became shorter while it was sent")
            offset, nbytes = offset + sent, nbytes - sent

    def flush(self, *, more: bool = False) -> None:
        """Send what was gathered."""
        if self._gathered or not more:
            gathered, self._gathered = self._gathered, bytearray()
            send(self._connection, gathered, more=more)


def send_range(outlet: Outlet, found: Found) -> int:
    """Send the wanted bytes; return the checksum of what the trailer covers."""
    want = found.want
    if not found.is_contiguous:
        return _send_cut(outlet, found)
    fd, offset = found.location()
    digest = found.slot.manifest.checksums[found.index]
    if found.covers is Covers.RANGE:
        digest = hash_range(fd, offset + want.start, want.stop - want.start)
    outlet.put_file(fd, offset + want.start + want.skip, want.stop - want.start - want.skip)
    return digest


def _send_cut(outlet: Outlet, found: Found) -> int:
    want = found.want
    digest = xxhash.xxh3_64()
    for at, data in found.cut():
        wanted = memoryview(data)[max(0, want.start - at) : want.stop - at]
        digest.update(cast("bytes", wanted))
        missing = want.start + want.skip - max(at, want.start)
        outlet.put(wanted[max(0, missing) :])
    return digest.intdigest()
