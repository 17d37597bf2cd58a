"""Getting a main thread out of a collective: shutting down this process's own Gloo connections.

A survivor that is not next to the dead process waits in its collective for ever, since none of its sockets
ever closes. After `shutdown` both directions end and the collective raises. Only Gloo's connections are
touched: those whose local port is one that this process's backend listens on, or whose remote port is one
that a peer's listens on; never the user's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

_LISTEN = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    """One TCP socket of this process."""

    fd: int
    inode: int
    local_port: int
    remote_port: int
    is_listening: bool


def own_tcp_sockets() -> list[TcpSocket]:
    """The TCP sockets of this process, as the kernel lists them."""
    by_inode: dict[str, tuple[int, int, str]] = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                ports = (int(fields[1].rpartition(":")[2], 16), int(fields[2].rpartition(":")[2], 16))
                by_inode[fields[9]] = (*ports, fields[3])
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor was closed while we looked
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:[") and (entry := by_inode.get(target[8:-1])) is not None:
                local_port, remote_port, status = entry
                found.append(
                    TcpSocket(
                        fd=int(name),
                        inode=int(target[8:-1]),
                        local_port=local_port,
                        remote_port=remote_port,
                        is_listening=status == _LISTEN,
                    )
                )
    return found


def listening_ports() -> frozenset[int]:
    """The ports this process listens on."""
    return frozenset(found.local_port for found in own_tcp_sockets() if found.is_listening)


class GlooSockets:
    """The Gloo connections of the current world: known by the listening ports of this process and of its
    peers.
    """

    def __init__(self, own_ports: frozenset[int], peer_ports: frozenset[int]) -> None:
        self._own_ports = own_ports
        self._peer_ports = peer_ports

    def shut_down(self) -> int:
        """Shut down every Gloo connection; returns how many there were."""
        count = 0
        for found in own_tcp_sockets():
            if found.is_listening:
                continue
            if found.local_port in self._own_ports or found.remote_port in self._peer_ports:
                with contextlib.suppress(OSError):  # closed, or already shut down
                    count += _shut_down(found)
        return count


def _shut_down(found: TcpSocket) -> bool:
    """Shut down this very socket: its descriptor may by now stand for another, which must stay untouched."""
    with socket.socket(fileno=os.dup(found.fd)) as duplicate:
        is_same = os.fstat(duplicate.fileno()).st_ino == found.inode
        if is_same:
            duplicate.shutdown(socket.SHUT_RDWR)
        return is_same
