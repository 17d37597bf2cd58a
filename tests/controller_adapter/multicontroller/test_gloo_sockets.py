"""Which sockets are shut down to get a thread out of a collective: the backend's, and never another one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from controller_adapter.multicontroller import gloo_sockets
from controller_adapter.multicontroller.gloo_sockets import GlooSockets, TcpSocket, listening_ports


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def connected(stack: ExitStack) -> tuple[int, socket.socket, socket.socket]:
    """A listener's port, and the two ends of a connection to it."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    near = stack.enter_context(socket.create_connection(listener.getsockname()))
    far, _ = listener.accept()
    stack.enter_context(far)
    return listener.getsockname()[1], near, far


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_connections_to_known_ports_are_shut_down_and_others_are_not(stack: ExitStack) -> None:
    own_port, _, own = connected(stack)
    peer_port, peer, _ = connected(stack)
    _, other, _ = connected(stack)
    GlooSockets(frozenset({own_port}), frozenset({peer_port})).shut_down()
    assert not is_open(own)
    assert not is_open(peer)
    assert is_open(other)


def test_own_listening_port_is_seen(stack: ExitStack) -> None:
    before = listening_ports()
    port, _, _ = connected(stack)
    assert listening_ports() - before == {port}


def test_descriptor_that_stands_for_another_socket_by_now_is_left_alone(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, near, _ = connected(stack)
    stale = TcpSocket(
        fd=near.fileno(),
        inode=os.fstat(near.fileno()).st_ino + 1,
        local_port=port,
        remote_port=1,
        is_listening=False,
    )
    monkeypatch.setattr(gloo_sockets, "own_tcp_sockets", lambda: [stale])
    assert GlooSockets(frozenset({port}), frozenset()).shut_down() == 0
    assert is_open(near)
