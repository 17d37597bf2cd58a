"""The coordinator's gRPC server: who may call is decided before anything of a message is read.

Bounds for strangers: gRPC's own on headers, a handshake's time, connections without a call, and calls at a
time; a body is read only after the token of its call was checked.
"""

from __future__ import annotations

import hmac
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Protocol

import grpc

from elastic import control_pb2 as pb
from elastic.control_channel import AUTHORIZATION, server_credentials
from elastic.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from elastic.wire import WireError
from snapshot.tls import TlsFiles

MAX_MESSAGE_BYTES = 256 << 20
"""Layouts and lists of shards of a large state are beyond gRPC's default of 4 MiB."""
HANDSHAKE_S = 5.0
IDLE_S = 60.0
"""How long a connection may be open without a call; an attached agent's has one all the time."""
SPARE_CALLS = 24
"""Calls at a time beside the agents' streams; what is beyond is turned away at once."""
WRONG_TOKEN = "wrong or missing job token"
CLOSED = object()
"""In an agent's queue of commands: its stream is to end."""


class UnknownSenderError(WireError):
    """Somebody speaks for a slice that is not theirs, or not of this job."""

    kind = "unknown-sender"
    remedy = "Start one agent for each slice of the job."


class Desk(Protocol):
    """What the service hands on to: the coordinator."""

    def attach(self, first: pb.Envelope) -> queue.SimpleQueue[Any]:
        """Take in an agent's first message; returns its queue of commands. Raises WireError."""
        ...

    def may_command(self) -> bool:
        """Whether what is in the queues of commands may still go out."""
        ...

    def hear(self, member: int, outbox: queue.SimpleQueue[Any], envelope: pb.Envelope) -> None:
        """Take in one message of an attached agent. Raises WireError."""
        ...

    def detach(self, member: int, outbox: queue.SimpleQueue[Any]) -> None:
        """An agent's stream has ended."""
        ...

    def note(self, envelope: pb.Envelope) -> None:
        """Take in a record from outside the job. Raises WireError."""
        ...

    def name(self, member: int) -> str:
        """A member for a sentence."""
        ...

    def refuse(self, sender: str, reason: str, cause: str) -> None:
        """Count that a call was refused."""
        ...

    def stop(self, reason: str) -> None:
        """End the job."""
        ...

    def status(self) -> bytes:
        """The job as JSON."""
        ...


class TokenGate(grpc.ServerInterceptor):
    """Lets calls with the job's token through. Others end before their message is read."""

    def __init__(self, token: str, refuse: Callable[[str, str, str], None]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refuse = refuse
        # As a stream: gRPC would read the message of a call with a single one before it asked us.
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._end)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of the call, or the one that refuses it."""
        offered = dict(details.invocation_metadata or ()).get(AUTHORIZATION, "")
        offered_bytes = offered if isinstance(offered, bytes) else offered.encode()
        if hmac.compare_digest(offered_bytes, self._expected):
            return continuation(details)
        return self._refusal

    def _end(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self._refuse(context.peer(), WRONG_TOKEN, "wrong-token")
        context.abort(grpc.StatusCode.UNAUTHENTICATED, WRONG_TOKEN)


class ControlService(ControlServicer):
    """gRPC handlers: envelopes are handed on."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def Attach(self, requests: Iterator[pb.Envelope], context: grpc.ServicerContext) -> Iterator[pb.Envelope]:
        """An agent's stream."""
        first = next(requests)
        try:
            outbox = self._desk.attach(first)
        except WireError as error:
            self._refuse(context, error)
        reader = threading.Thread(target=self._read, args=(first.member, outbox, requests), daemon=True)
        reader.start()
        while (envelope := outbox.get()) is not CLOSED and self._desk.may_command():
            yield envelope

    def _read(self, member: int, outbox: queue.SimpleQueue[Any], requests: Iterator[pb.Envelope]) -> None:
        try:
            for envelope in requests:
                self._desk.hear(member, outbox, envelope)
        except (grpc.RpcError, WireError) as error:
            if isinstance(error, WireError):
                self._desk.refuse(self._desk.name(member), str(error), "bad-message")
        finally:
            self._desk.detach(member, outbox)

    def Note(self, request: pb.Envelope, context: grpc.ServicerContext) -> pb.Ack:
        """A record from outside the job."""
        try:
            self._desk.note(request)
        except WireError as error:
            self._refuse(context, error)
        return pb.Ack()

    def Stop(self, request: pb.StopRequest, context: grpc.ServicerContext) -> pb.Ack:
        """End the job."""
        self._desk.stop(request.reason)
        return pb.Ack()

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        """The job now."""
        return pb.StatusReply(status=self._desk.status())

    def _refuse(self, context: grpc.ServicerContext, error: WireError) -> None:
        cause = "unknown-sender" if isinstance(error, UnknownSenderError) else "bad-message"
        self._desk.refuse(context.peer(), str(error), cause)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def make_server(
    desk: Desk, token: str, num_members: int, *, bind_host: str, tls: TlsFiles | None
) -> tuple[grpc.Server, str]:
    """A server of the control service, to be started, and its address. Raises UsageError for TLS files that
    cannot be used, RuntimeError when it cannot listen.
    """
    num_calls = 2 * num_members + SPARE_CALLS
    server = grpc.server(
        futures.ThreadPoolExecutor(num_calls),
        interceptors=[TokenGate(token, desk.refuse)],
        maximum_concurrent_rpcs=num_calls,
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
            ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
            ("grpc.so_reuseport", 0),
        ),
    )
    add_ControlServicer_to_server(ControlService(desk), server)
    host = f"[{bind_host}]" if ":" in bind_host else bind_host
    if tls is None:
        port = server.add_insecure_port(f"{host}:0")
    else:
        port = server.add_secure_port(f"{host}:0", server_credentials(tls))
    return server, f"{host}:{port}"
