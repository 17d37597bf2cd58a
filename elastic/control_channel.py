"""The way to a job's coordinator: where it listens, and channels to it, with TLS where the job has it.

The coordinator's certificate is checked against the job's authority and by the name that the coordinator
wrote into the run's directory; its address may change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec

from elastic.job import COORDINATOR_FILE, load_job, load_token
from reshard.errors import UsageError
from snapshot.tls import TlsFiles, certificate_name

AUTHORIZATION = "authorization"
Metadata = tuple[tuple[str, str], ...]
_RECONNECT = (
    # Each channel has connections of its own, and tries anew each second: after a time in which packets were
    # lost without a word, gRPC's own pauses (up to two minutes) would outlast every lease.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPlace:
    """Where a coordinator listens, its process and epoch, and the name in its certificate ("": no TLS)."""

    address: str
    pid: int
    tls_name: str = ""
    epoch: int = 0


def write_place(directory: Path, address: str, tls: TlsFiles | None, epoch: int = 0) -> None:
    """Let those who can read the run's directory find this process's service, instead of an older one's."""
    name = "" if tls is None else certificate_name(tls)
    place = CoordinatorPlace(address=address, pid=os.getpid(), tls_name=name, epoch=epoch)
    path = directory / COORDINATOR_FILE
    unfinished = path.with_suffix(f".part-{os.getpid()}")
    unfinished.write_bytes(msgspec.json.encode(place))
    unfinished.replace(path)


def read_place(directory: Path) -> CoordinatorPlace:
    """Where the job's coordinator listens. Raises OSError when none has written it, UsageError."""
    path = directory / COORDINATOR_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=CoordinatorPlace)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def open_channel(
    place: CoordinatorPlace, tls: TlsFiles | None, *, max_reply_bytes: int | None = None
) -> grpc.Channel:
    """A channel to the coordinator; it connects when it is first used. Raises UsageError for TLS files that
    cannot be read.
    """
    options: list[tuple[str, object]] = list(_RECONNECT)
    if max_reply_bytes is not None:
        options.append(("grpc.max_receive_message_length", max_reply_bytes))
    if tls is None:
        return grpc.insecure_channel(place.address, options=options)
    cert, key, ca = _read(tls)
    options.append(("grpc.ssl_target_name_override", place.tls_name))
    return grpc.secure_channel(place.address, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """What a server shows, and what it asks of its callers: a certificate of the job. Raises UsageError."""
    certificate_name(tls)
    cert, key, ca = _read(tls)
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


def bearer(token: str) -> Metadata:
    """What goes with every call."""
    return ((AUTHORIZATION, f"Bearer {token}"),)


def job_channel(directory: Path) -> tuple[grpc.Channel, Metadata]:
    """A channel to the coordinator of the job in `directory`, and what goes with each call.

    Raises UsageError when there is no such job, or its token or certificates cannot be read.
    """
    try:
        place = read_place(directory)
    except OSError as error:
        raise UsageError(f"{directory} holds no job that was started") from error
    return open_channel(place, load_job(directory).tls), bearer(load_token(directory))


def _read(tls: TlsFiles) -> tuple[bytes, bytes, bytes]:
    try:
        return tls.cert.read_bytes(), tls.key.read_bytes(), (tls.ca or tls.cert).read_bytes()
    except OSError as error:
        raise UsageError(f"TLS files {tls} cannot be used: {error}") from error
