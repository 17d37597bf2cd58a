"""Asking a live job how it is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import msgspec

from elastic import control_pb2 as pb
from elastic.control_channel import job_channel
from elastic.control_pb2_grpc import ControlStub
from reshard.errors import RetryLaterError

TIMEOUT_S = 3.0


def ask_status(directory: Path) -> dict[str, Any]:
    """The status of the job in `directory`, from its coordinator. Raises UsageError, RetryLaterError."""
    channel, metadata = job_channel(directory)
    with channel:
        try:
            reply = ControlStub(channel).Status(pb.StatusRequest(), metadata=metadata, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise RetryLaterError(
                f"the job in {directory} does not answer: it hangs, or has ended (see `elastic report`)"
            ) from error
    found: dict[str, Any] = msgspec.json.decode(reply.status)
    return found
