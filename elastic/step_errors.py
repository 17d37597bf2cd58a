"""Errors out of a training step: which may come from a loss, and letting go of what they hold."""

from __future__ import annotations

import re
import traceback

import jax

_RUNTIME_STATUS = re.compile(
    r"(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE"
    r"|UNKNOWN): "
)
"""How messages of the runtime begin. Where a program runs while it is dispatched, as small ones on CPU do,
JAX 0.10 raises a failed collective as a ValueError."""


MAX_TEXT = 2000


def clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error, and of its causes, hold: arrays of the lost world."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def describe(error: BaseException) -> str:
    """An error in a line or a few, for the end of the job; what to do where memory ran out."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, MemoryError):
        text = f"the host is out of memory: {text}"
    elif "RESOURCE_EXHAUSTED" in text:
        text = f"the devices are out of memory (micro-batches, max_rows_per_device, need less): {text}"
    return text[:MAX_TEXT]


def may_be_loss(error: BaseException | None) -> bool:
    """Whether an error, or one it was raised from, came from the runtime rather than from Python code."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        if isinstance(error, ValueError) and _RUNTIME_STATUS.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
