"""The serving side of the data plane: one agent's snapshots, straight from the slot files.

A thread for each connection, and bounds for all that a stranger or a slow peer could use up: callers that
have not proved themselves yet, callers, the time of a handshake, the size of a request, and how long bytes
may wait for a reader. What is sent is held by the kernel (`sendfile`) or in one block, whatever the size of a
shard.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable

from reshard.errors import UsageError
from snapshot.arena import Arena
from snapshot.dataplane_auth import HANDSHAKE_S, admit, challenge, refuse, turn_away
from snapshot.dataplane_find import Finder, Refusal
from snapshot.dataplane_outlet import Outlet, send_range
from snapshot.dataplane_slots import SlotCache
from snapshot.dataplane_wire import (
    HEAD,
    MARK,
    TRAILER,
    ProtocolError,
    ReadRequest,
    Status,
    error_head,
    is_loopback,
    receive_request,
    set_timeout,
    tune,
)
from snapshot.tls import TlsFiles

MAX_CALLERS = 64
MAX_STRANGERS = 32
"""Callers that have not proved themselves yet; one more, and the oldest of them is dropped."""
IDLE_S = 60.0
"""How long a caller may ask for nothing, or take nothing of what it asked for."""
ACCEPT_AGAIN_S = 0.01
"""How long after a call that could not be taken the next one is waited for."""


class DataPlaneServer:
    """Serves one arena's shards to the agents of the job, from `start` to `close`.

    `current_generation` is asked at each request. A caller with an older one is refused; a newer one is
    served, as it may know of the change before this agent does. `refused` counts callers and requests that
    were refused; `on_refused` is told of each, from any thread, why and whom. Raises UsageError for an empty
    token or TLS files that cannot be used, OSError when it cannot listen.
    """

    def __init__(
        self,
        arena: Arena,
        token: str,
        current_generation: Callable[[], int],
        *,
        bind_host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsFiles | None = None,
        on_refused: Callable[[str, str], None] = lambda reason, sender: None,
    ) -> None:
        if not token:
            raise UsageError("the data plane needs the job's token, and it must not be empty")
        self._token = token.encode()
        self._current_generation = current_generation
        self._on_refused = on_refused
        self._tls = None if tls is None else tls.server_context()
        self._slots = SlotCache(arena)
        self._loopback = is_loopback(bind_host)
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tune(self._listener, loopback=self._loopback)
            self._listener.bind((bind_host, port))
            self._listener.listen(MAX_CALLERS)
        except OSError:
            self._listener.close()
            raise
        host = f"[{bind_host}]" if ":" in bind_host else bind_host
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.refused = 0
        self._lock = threading.Lock()
        self._strangers: dict[_Caller, None] = {}
        self._callers: dict[_Caller, None] = {}
        self._acceptor = threading.Thread(target=self._accept, name="data-plane", daemon=True)
        self._closing = False

    def start(self) -> None:
        """Begin to serve."""
        self._acceptor.start()

    def close(self) -> None:
        """Stop serving: open transfers break off. Harmless when already closed."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.is_alive():
            self._acceptor.join()
        self._listener.close()
        with self._lock:
            open_now = {**self._strangers, **self._callers}
            for caller in open_now:
                caller.break_off()
        for caller in open_now:
            caller.thread.join()

    # ---- callers ----

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, sender = self._listener.accept()
            except OSError:
                if not self._closing:  # out of descriptors, or the caller has gone again
                    time.sleep(ACCEPT_AGAIN_S)
                continue
            caller = _Caller(connection, sender[0], self._serve)
            with self._lock:
                if len(self._strangers) >= MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    oldest.dropped = True
                    oldest.break_off()
                self._strangers[caller] = None
            caller.thread.start()

    def _serve(self, caller: _Caller) -> None:
        try:
            until_s = time.monotonic() + HANDSHAKE_S
            caller.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                caller.wrap(self._tls)
            set_timeout(caller.connection, HANDSHAKE_S)
            if self._admit(caller, until_s):
                set_timeout(caller.connection, IDLE_S)
                while True:
                    self._answer(caller, receive_request(caller.connection))
        except OSError as error:  # it went away, says nothing, or what we do not understand
            if caller.dropped:
                self._count_refused("too-many", caller)
            elif (reason := _refusal_of(error, caller)) is not None:
                self._count_refused(reason, caller)
        finally:
            with self._lock:
                self._strangers.pop(caller, None)
                self._callers.pop(caller, None)
            caller.connection.close()

    def _admit(self, caller: _Caller, until_s: float) -> bool:
        proof = challenge(caller.connection, self._token, until_s)
        if proof is None:
            self._count_refused("wrong-token", caller)
            refuse(caller.connection)
            return False
        with self._lock:
            self._strangers.pop(caller, None)
            is_full = len(self._callers) >= MAX_CALLERS
            if not is_full:
                self._callers[caller] = None
        caller.proved = True
        if is_full:
            self._count_refused("too-many", caller)
            turn_away(caller.connection)
        else:
            admit(caller.connection, proof)
        return not is_full

    def _count_refused(self, reason: str, caller: _Caller) -> None:
        with self._lock:
            self.refused += 1
        self._on_refused(reason, caller.sender)

    # ---- requests ----

    def _answer(self, caller: _Caller, request: ReadRequest) -> None:
        slots, rejected = self._slots.open()
        try:
            self._send_wanted(caller, request, Finder(request, slots, rejected))
        finally:
            for slot in slots:
                slot.close()

    def _send_wanted(self, caller: _Caller, request: ReadRequest, finder: Finder) -> None:
        outlet = Outlet(caller.connection)
        for want in request.wants:
            current = self._current_generation()
            if request.generation < current:
                self._count_refused("stale-generation", caller)
                text = f"stale generation {request.generation}, the job is at {current}"
                outlet.put(error_head(Status.STALE, text))
                break
            try:
                found = finder.find(want)
            except Refusal as refusal:
                outlet.put(error_head(refusal.status, refusal.text))
                continue
            outlet.put(HEAD.pack(Status.OK, found.covers, MARK, 0, found.box_bytes))
            digest = send_range(outlet, found)
            status = Status.OK if found.slot.reader.is_unchanged() else Status.OVERWRITTEN
            outlet.put(TRAILER.pack(status, MARK, digest))
        outlet.flush()


class _Caller:
    """A connection and the thread that serves it."""

    def __init__(self, connection: socket.socket, sender: str, serve: Callable[[_Caller], None]) -> None:
        self.connection = connection
        self.sender = sender
        self.proved = False
        self.dropped = False
        self.thread = threading.Thread(target=serve, args=(self,), name="data-plane-caller", daemon=True)

    def wrap(self, context: ssl.SSLContext) -> None:
        """Put TLS on the connection."""
        self.connection.settimeout(HANDSHAKE_S)
        wrapped = context.wrap_socket(self.connection, server_side=True, do_handshake_on_connect=False)
        self.connection = wrapped
        wrapped.do_handshake()

    def break_off(self) -> None:
        """Wake the thread that waits for a peer; it closes the connection itself."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


def _refusal_of(error: OSError, caller: _Caller) -> str | None:
    """Why a connection that ended in this error counts as refused; None: it has gone, or has had its time."""
    if isinstance(error, ProtocolError):
        return "bad-message"
    if isinstance(error, TimeoutError):
        return None if caller.proved else "too-slow"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return None if caller.proved else "tls"
    return None
