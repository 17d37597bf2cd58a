"""What an agent and its writer process say to each other: a job each way in, reports out, one JSON a line."""

from __future__ import annotations

from typing import Any

import msgspec

from reshard.boxes import Box
from reshard.errors import ElasticError, MissingShardError, UsageError
from reshard.layout import Layout
from snapshot.persist_format import PersistFacts
from snapshot.persist_tree import TreeDescription


class WriteJob(msgspec.Struct, frozen=True, kw_only=True, tag="write"):
    """Write `shards`, found in `slots` (slot files) as captured at `step` in `generation`, into `staging`."""

    staging: str
    slots: tuple[str, ...]
    step: int
    generation: int
    layout: Layout
    tree: TreeDescription
    shards: tuple[tuple[str, Box], ...]


class FinishJob(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """Finish `staging`, into which every host has written its share; then keep only the newest `keep`."""

    root: str
    staging: str
    facts: PersistFacts
    restored_steps: dict[int, int] = {}
    keep: int | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """So many bytes of this job are durable."""

    written_bytes: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The job is done. `path`, `generation`: of the finished snapshot; `removed`: the steps pruned."""

    written_bytes: int = 0
    path: str = ""
    generation: int = 0
    removed: tuple[int, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The job failed: `kind` is that of the error; of one of the file system "persistent-tier:<reason>".

    "corrupt-source" and "overwritten-source" are said of the slots a share is read from.
    """

    kind: str
    message: str
    remedy: str = ""


Job = WriteJob | FinishJob
Report = Progress | Done | Failed

_encoder = msgspec.json.Encoder()
_jobs = msgspec.json.Decoder(Job)
_reports = msgspec.json.Decoder(Report)


def encode_line(message: Job | Report) -> bytes:
    """Write a message as one line."""
    return _encoder.encode(message) + b"\n"


def decode_job(line: bytes) -> Job:
    """Read a job. Raises UsageError for anything else."""
    job: Job = _decode(_jobs, line)
    return job


def decode_report(line: bytes) -> Report:
    """Read a report. Raises UsageError for anything else."""
    report: Report = _decode(_reports, line)
    return report


def failed(error: ElasticError, rejected: list[str] | None = None) -> Failed:
    """Return the report of an error; of a share, `rejected` is why copies in its slots were passed over."""
    kind, message = error.kind, error.message
    if "reason" in error.fields:
        kind = f"{kind}:{error.fields['reason']}"
    if isinstance(error, MissingShardError) and rejected is not None:
        overwritten = not rejected or any("overwritten while" in reason for reason in rejected)
        kind = "overwritten-source" if overwritten else "corrupt-source"
        message = f"{message}: {rejected[-1] if rejected else 'its slot holds another snapshot by now'}"
    return Failed(kind=kind, message=message, remedy=error.remedy)


def _decode(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, ElasticError) as error:
        raise UsageError(f"not a message of the persistent writer: {error}") from error
