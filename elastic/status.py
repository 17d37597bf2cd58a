"""Asking a live job how it is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import msgspec

from elastic import control_pb2 as pb
from elastic.control_pb2_grpc import ControlStub
from elastic.job import COORDINATOR_FILE, load_token
from reshard.errors import RetryLaterError, UsageError

TIMEOUT_S = 3.0


def ask_status(directory: Path) -> dict[str, Any]:
    """The status of the job in `directory`, from its coordinator. Raises UsageError, RetryLaterError."""
    try:
        address = str(msgspec.json.decode((directory / COORDINATOR_FILE).read_bytes())["address"])
    except OSError as error:
        raise UsageError(f"{directory} holds no job that was started") from error
    metadata = (("authorization", f"Bearer {load_token(directory)}"),)
    with grpc.insecure_channel(address) as channel:
        try:
            reply = ControlStub(channel).Status(pb.StatusRequest(), metadata=metadata, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise RetryLaterError(
                f"the job in {directory} does not answer: it hangs, or has ended (see `elastic report`)"
            ) from error
    found: dict[str, Any] = msgspec.json.decode(reply.status)
    return found
