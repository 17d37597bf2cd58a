"""Errors of the data plane that a caller may want to tell apart, and what a peer's refusal becomes."""

from __future__ import annotations

from reshard.boxes import Box
from reshard.errors import CorruptCopyError, ElasticError, MissingShardError, RetryLaterError, UsageError
from snapshot.dataplane_wire import Status


class NotCapturedYetError(RetryLaterError):
    """The peer has not captured that step yet; it may in a moment."""

    kind = "not-captured-yet"
    remedy = "Ask again when the peer has captured that step."


class OverwrittenError(MissingShardError):
    """The peer has captured later steps over the one asked for."""

    kind = "overwritten"
    remedy = "Ask for a newer step, or another host that still has this one."


def explain(status: int, text: str, address: str, path: str, box: Box, step: int) -> ElasticError:
    """Return the error for a want that the agent at `address` refused."""
    message = f"agent at {address}: {text}"
    if status == Status.STALE:
        return UsageError(
            message, remedy="Ask the coordinator for the present generation.", address=address, step=step
        )
    if status == Status.MISSING:
        return MissingShardError(path, box, step, lost=(address,))
    if status == Status.OVERWRITTEN:
        return OverwrittenError(path, box, step, lost=(address,))
    if status == Status.CORRUPT:
        return CorruptCopyError(message, address=address, path=path, box=box, step=step)
    if status == Status.NOT_YET:
        return NotCapturedYetError(message, address=address, path=path, box=box, step=step)
    return UsageError(message, address=address, path=path, box=box, step=step)
