"""Finding a job's files in host memory by what a person knows: its id, its run directory, or nothing."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from reshard.errors import UsageError
from reshard.ids import HostId
from snapshot.buddy_slots import BUDDY_PREFIX
from snapshot.gc import list_jobs
from snapshot.job import DEFAULT_ROOT, JOB_PREFIX, host_directories, job_directory

JOB_FILE = "job.json"
_SLOT = re.compile(rf"(slot|{BUDDY_PREFIX})\d+", re.ASCII)
START_ONE = (
    "Start one with `elastic demo` or `elastic launch`, or name a job that `elastic snapshot ls` lists."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundJob:
    """A job that has a directory in host memory."""

    job_id: str
    directory: Path


class _JobFile(msgspec.Struct):
    job_id: str
    shm_root: str = str(DEFAULT_ROOT)


def find_job(where: str | os.PathLike[str] | None = None, *, root: Path = DEFAULT_ROOT) -> FoundJob:
    """Return the job that `where` names: a job id, a run directory, or None for the only live job.

    A run directory says itself where its snapshots are; `root` counts for the others. No lock stays
    taken. Raises UsageError, saying what there is, when no job or more than one fits.
    """
    if where is None:
        return _only_live_job(root)
    directory = Path(where)
    if (directory / JOB_FILE).is_file():
        return _job_of_run(directory)
    if directory.name.startswith(JOB_PREFIX) and any(True for _ in host_directories(directory)):
        return FoundJob(job_id=directory.name.removeprefix(JOB_PREFIX), directory=directory)
    if directory.is_dir():
        raise UsageError(
            f"{directory} holds no job: there is no {JOB_FILE} in it",
            remedy="Name the directory of a run (its --out), or a job that `elastic snapshot ls` lists.",
        )
    name = os.fspath(where)
    if os.sep in name:
        raise UsageError(f"there is no run directory {name}", remedy=START_ONE)
    found = job_directory(root, name)
    if not found.is_dir():
        raise UsageError(
            f"there is no run directory {name}, and no job of that id in {root}", remedy=START_ONE
        )
    return FoundJob(job_id=name, directory=found)


def slot_files(job: FoundJob) -> tuple[tuple[HostId, Path], ...]:
    """Return the slots of all hosts of the job on this machine, also those kept for other slices, by host."""
    found: list[tuple[HostId, Path]] = []
    for host, directory in host_directories(job.directory):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:  # the job is ending
            continue
        slots = sorted(filter(_SLOT.fullmatch, names), key=lambda name: (name[0] == "b", len(name), name))
        found += [(host, directory / name) for name in slots]
    return tuple(found)


def _only_live_job(root: Path) -> FoundJob:
    live = [job for job in list_jobs(root) if job.is_alive]
    if not live:
        raise UsageError(f"no live job has snapshots in {root}", remedy=START_ONE)
    if len(live) > 1:
        raise UsageError(
            f"{len(live)} live jobs have snapshots in {root}: {', '.join(job.job_id for job in live)}",
            remedy="Name one, or its run directory.",
        )
    return FoundJob(job_id=live[0].job_id, directory=Path(live[0].directory))


def _job_of_run(directory: Path) -> FoundJob:
    path = directory / JOB_FILE
    try:
        described = msgspec.json.decode(path.read_bytes(), type=_JobFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    found = job_directory(Path(described.shm_root), described.job_id)
    if not found.is_dir():
        raise UsageError(
            f"job {described.job_id} of {directory} has nothing in {described.shm_root}: it has ended, or "
            "runs on other machines",
            remedy=START_ONE,
        )
    return FoundJob(job_id=described.job_id, directory=found)
