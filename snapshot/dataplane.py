"""The data plane: one agent reads snapshot shards out of another agent's arena, over gRPC.

Every call carries the job's token and the caller's generation. The bytes come straight from the slots
and are verified twice: by the server against the manifest, by the receiver against what was sent.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tenacity

from reshard.boxes import Box, format_box
from reshard.errors import CorruptCopyError, ElasticError, MissingShardError, RetryLaterError, UsageError
from snapshot import dataplane_pb2 as pb
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.dataplane_pb2_grpc import DataPlaneServicer, DataPlaneStub, add_DataPlaneServicer_to_server
from snapshot.slot import Bytes
from snapshot.source import ShardSource

CHUNK_BYTES = 1 << 20
AUTHORIZATION = "authorization"
WANT_INDEX = "want-index"

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
)
_RETRY_WAIT = tenacity.wait_random_exponential(multiplier=0.02, max=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedShard:
    """A box as it came from a peer, verified: its elements in C order."""

    path: str
    box: Box
    data: Bytes
    checksum: int


class DataPlaneServer(DataPlaneServicer):
    """Serves one arena's shards to the agents of the job.

    `current_generation` is asked at each call. A caller with an older one is refused with
    FAILED_PRECONDITION; a newer one is served, as it may know of the change before this agent does.
    """

    def __init__(self, arena: Arena, token: str, current_generation: Callable[[], int]) -> None:
        if not token:
            raise UsageError("the data plane needs the job's token, and it must not be empty")
        self._arena = arena
        self._expected = f"Bearer {token}".encode()
        self._current_generation = current_generation

    def add_to(self, server: grpc.Server) -> None:
        """Register the service with a server that is not started yet."""
        add_DataPlaneServicer_to_server(self, server)

    def Read(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> Iterator[pb.ReadChunk]:
        """Stream the wanted boxes (gRPC handler)."""
        self._admit(request, context)
        source = self._arena.find_shards(request.step, request.of_generation or None)
        try:
            for index, want in enumerate(request.wants):
                yield from _chunks(index, _read(source, index, want, context))
        finally:
            source.close()

    def _admit(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> None:
        offered = dict(context.invocation_metadata() or ()).get(AUTHORIZATION, "")
        offered_bytes = offered if isinstance(offered, bytes) else offered.encode()
        if not hmac.compare_digest(offered_bytes, self._expected):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing job token")
        current = self._current_generation()
        if request.generation < current:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"stale generation {request.generation}, the job is at {current}",
            )


def _read(source: ShardSource, index: int, want: pb.Want, context: grpc.ServicerContext) -> Bytes:
    box = tuple((part.start, part.stop) for part in want.box)
    try:
        elements = source.read_piece(want.path, box)
    except MissingShardError as error:
        context.set_trailing_metadata(((WANT_INDEX, str(index)),))
        if source.rejected:
            context.abort(grpc.StatusCode.DATA_LOSS, "; ".join(source.rejected[-3:]))
        context.abort(grpc.StatusCode.NOT_FOUND, error.message)
    return elements.reshape(-1).view(np.uint8) if elements.size else np.empty(0, np.uint8)


def _chunks(index: int, data: Bytes) -> Iterator[pb.ReadChunk]:
    digest = checksum(data)
    last_start = max(0, (len(data) - 1) // CHUNK_BYTES * CHUNK_BYTES)
    for start in range(0, last_start + 1, CHUNK_BYTES):
        payload = data[start : start + CHUNK_BYTES].tobytes()
        is_last = start == last_start
        yield pb.ReadChunk(want_index=index, data=payload, is_last=is_last, checksum=digest if is_last else 0)


def fetch(
    address: str,
    token: str,
    *,
    generation: int,
    step: int,
    wants: Sequence[tuple[str, Box]],
    deadline_s: float,
    of_generation: int | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> tuple[FetchedShard, ...]:
    """Read boxes of the snapshot of `step` from the agent at `address`, in the order of `wants`.

    A box is a stored shard or a piece of one. `of_generation` is the one the snapshot was captured in (None:
    any). A peer that cannot be reached is tried again until `deadline_s` is over. Raises RetryLaterError
    then, MissingShardError when the peer does not have it, CorruptCopyError when its copy or the transfer is
    damaged, UsageError for a wrong token or a stale generation.
    """
    request = pb.ReadRequest(
        generation=generation,
        step=step,
        wants=[_want(path, box) for path, box in wants],
        of_generation=of_generation or 0,
    )
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_unavailable),
        stop=tenacity.stop_after_delay(deadline_s),
        wait=_RETRY_WAIT,
        reraise=True,
    )
    expires_s = time.monotonic() + deadline_s
    channel = (
        grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
    )
    with channel:
        try:
            return retrying(_fetch_once, channel, token, request, wants, expires_s)
        except grpc.RpcError as error:
            raise _explain(error, address, step, wants) from error


def _fetch_once(
    channel: grpc.Channel,
    token: str,
    request: pb.ReadRequest,
    wants: Sequence[tuple[str, Box]],
    expires_s: float,
) -> tuple[FetchedShard, ...]:
    metadata = ((AUTHORIZATION, f"Bearer {token}"),)
    received: list[FetchedShard] = []
    parts: list[bytes] = []
    timeout_s = max(0.001, expires_s - time.monotonic())
    stub = DataPlaneStub(channel)
    for chunk in stub.Read(request, timeout=timeout_s, metadata=metadata):
        if chunk.want_index != len(received) or len(received) == len(wants):
            raise CorruptCopyError(f"the peer sent box {chunk.want_index} where {len(received)} was due")
        parts.append(chunk.data)
        if chunk.is_last:
            received.append(_verified(*wants[len(received)], b"".join(parts), chunk.checksum))
            parts = []
    if len(received) != len(wants):
        raise CorruptCopyError(f"the peer sent {len(received)} of {len(wants)} boxes")
    return tuple(received)


def _verified(path: str, box: Box, data: bytes, expected: int) -> FetchedShard:
    if checksum(data) != expected:
        raise CorruptCopyError(f"{path} {format_box(box)} was damaged on its way", path=path, box=box)
    return FetchedShard(path=path, box=box, data=np.frombuffer(data, np.uint8), checksum=expected)


def _want(path: str, box: Box) -> pb.Want:
    return pb.Want(path=path, box=[pb.Range(start=start, stop=stop) for start, stop in box])


def _is_unavailable(error: BaseException) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE


def _explain(error: grpc.RpcError, address: str, step: int, wants: Sequence[tuple[str, Box]]) -> ElasticError:
    code, details = error.code(), error.details()
    message = f"agent at {address}: {details}"
    fields = {"address": address, "code": code.name}
    if code is grpc.StatusCode.DATA_LOSS:
        return CorruptCopyError(message, **fields)
    if code is grpc.StatusCode.NOT_FOUND:
        metadata: Any = error.trailing_metadata() or ()
        indexes = [int(value) for key, value in metadata if key == WANT_INDEX]
        return MissingShardError(*wants[indexes[0] if indexes else 0], step, lost=(address,))
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return RetryLaterError(message, **fields)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UsageError(message, remedy="Give both agents the token of the same job.", **fields)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return UsageError(message, remedy="Ask the coordinator for the present generation.", **fields)
    return RetryLaterError(message, **fields)
