"""The error root of the whole project: one class per remedy.

A handler asks "what can I do about it?", so classes are divided by the answer, not by the module that
raised. Every error has a stable `kind` for machines, an `exit_status` for the command line, a sentence
that says what to do, and its facts as `fields`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

Box = tuple[tuple[int, int], ...]
"""Half-open index ranges, one a dimension: `((0, 128), (64, 256))`; `()` is the box of a scalar."""


def _rebuild(cls: type[ElasticError], message: str, remedy: str, fields: dict[str, object]) -> ElasticError:
    error = cls.__new__(cls)
    ElasticError.__init__(error, message, remedy=remedy, **fields)
    return error


class ElasticError(Exception):
    """Root of every error this project raises on purpose.

    `str()` is the message followed by what to do next; `fields` holds the facts by name (also readable
    as attributes), so a handler need not parse text. Survives pickling between processes.
    """

    kind: ClassVar[str] = "elastic"
    exit_status: ClassVar[int] = 1
    remedy: str = "Please report this with the run's directory attached."

    def __init__(self, message: str, /, *, remedy: str | None = None, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
        if remedy is not None:
            self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message.rstrip('.')}. {self.remedy}"

    def __getattr__(self, name: str) -> object:
        # Only reached when normal lookup fails; `__dict__` avoids recursion on a half-built instance.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__!r} error has no field {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.remedy, self.fields)

    def to_dict(self) -> dict[str, object]:
        """Return kind, message, remedy, exit status and fields, for `--json` output and event records."""
        return {
            "kind": self.kind,
            "message": self.message,
            "remedy": self.remedy,
            "exit_status": self.exit_status,
            "fields": dict(self.fields),
        }


class UsageError(ElasticError):
    """The call, the configuration or the input is wrong; repeating it cannot help."""

    kind = "usage"
    exit_status = 2
    remedy = "Fix the call or the input named above and run again."


class RetryLaterError(ElasticError):
    """Nothing is broken for good: the same call may work in a moment."""

    kind = "retry-later"
    exit_status = 1
    remedy = "Try again; it may work once the other side is ready."


class CorruptCopyError(ElasticError):
    """One copy of the state cannot be trusted; others may be good."""

    kind = "corrupt-copy"
    exit_status = 1
    remedy = "Restore another copy of it."


class MissingShardError(ElasticError):
    """State is gone: no surviving holding covers `box` of array `path` at `step`.

    `lost` names what went away (hosts, slices), if the caller knows.
    """

    kind = "missing-shard"
    exit_status = 1
    remedy = "Restore an older step from the persistent tier, and raise `replicas` for the next run."
    path: str
    box: Box
    step: int | None
    lost: tuple[str, ...]

    def __init__(self, path: str, box: Box, step: int | None = None, *, lost: Iterable[object] = ()) -> None:
        lost_names = tuple(str(name) for name in lost)
        at_step = "" if step is None else f" at step {step}"
        gone_with = f" (lost: {', '.join(lost_names)})" if lost_names else ""
        super().__init__(
            f"no surviving copy of {path!r}, box {format_box(box)}{at_step}{gone_with}",
            path=path,
            box=box,
            step=step,
            lost=lost_names,
        )


class JobFailedError(ElasticError):
    """The job has ended without reaching its target; the message says why."""

    kind = "job-failed"
    exit_status = 1
    remedy = "Read the cause above and the run's report, then start the job again."


class InvariantBrokenError(ElasticError):
    """A promise of the engine does not hold: going on could damage the run."""

    kind = "invariant-broken"
    exit_status = 3
    remedy = "Stop the job and report this as a bug; the last good snapshot is untouched."


class InsufficientMemoryError(ElasticError):
    """A buffer of `needed_bytes` does not fit the `available_bytes` at `where` (for example /dev/shm)."""

    kind = "insufficient-memory"
    exit_status = 2
    remedy = "Enlarge it, or use fewer snapshot slots, fewer replicas or more hosts."
    needed_bytes: int
    available_bytes: int
    where: str

    def __init__(self, needed_bytes: int, available_bytes: int, where: str) -> None:
        super().__init__(
            f"{where} has {available_bytes:,} bytes available, {needed_bytes:,} are needed",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            where=where,
        )


class PersistentTierError(ElasticError):
    """The persistent tier could not be written or read; snapshots in memory are not touched.

    `reason` is "no-space", "permission", "missing" (no such directory), "stopped" or "io".
    """

    kind = "persistent-tier"
    exit_status = 1
    remedy = "See to that file system; training goes on, and the next snapshot is written anew."
    reason: str

    def __init__(self, reason: str, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy, reason=reason)


def format_box(box: Box) -> str:
    """Write a box as numpy slices, for messages: `[0:128, 64:256]`."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
