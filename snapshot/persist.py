"""Writing to the persistent tier: complete snapshots in a directory that plain Orbax reads.

    <root>/<step>/                 a checkpoint, complete from the moment it has its name
    <root>/.elastic/lock           held by the job that writes here
    <root>/.elastic/staging/…      being written
    <root>/.elastic/dead/…         being removed

`lock_root`, `begin`, then each host's share, then `persist_finish.finish` and `prune`;
`persist_list` reads what there is. Format: docs/persistent-format.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from reshard.errors import CorruptCopyError, UsageError
from snapshot.persist_errors import writing
from snapshot.persist_format import FACTS_NAME, ITEM_NAME, PersistFacts, decode_facts
from snapshot.persist_list import Persisted, list_persisted, read_persisted
from snapshot.shm import FileLock

_OWN_NAME = ".elastic"


def lock_root(root: Path, job_id: str, *, timeout_s: float = 2.0) -> FileLock:
    """Make `root` (its parent must exist) and lock it for writing; release it at the end of the job.

    Raises UsageError when another job still writes there after `timeout_s`, PersistentTierError when the
    directory cannot be used.
    """
    with writing(root):
        for path in (root, root / _OWN_NAME):
            path.mkdir(exist_ok=True)
        lock = FileLock.acquire(root / _OWN_NAME / "lock", shared=False, timeout_s=timeout_s)
        owner = root / _OWN_NAME / "owner"
        if lock is None:
            other = owner.read_text() if owner.exists() else "another job"
            raise UsageError(
                f"{other} writes its snapshots to {root}", remedy="Give each job a directory of its own."
            )
        owner.write_text(f"job {job_id}")
        return lock


def next_epoch(root: Path) -> int:
    """Return the epoch of a job that begins to write to `root`, for the holder of its lock."""
    return 1 + max((found.facts.epoch for found in list_persisted(root)), default=0)


def clear_staging(root: Path) -> None:
    """Remove what earlier jobs left unfinished, for the holder of the root's lock before it begins.

    Raises PersistentTierError.
    """
    with writing(root), contextlib.suppress(FileNotFoundError):
        for path in (root / _OWN_NAME / "staging").iterdir():
            _remove(root, path)


def begin(root: Path, step: int, generation: int, *, epoch: int = 1) -> Path:
    """Make the staging directory of a snapshot and return it; one that a retry left is used again.

    Those of other jobs and generations are of dead attempts, and removed; of this one, the newest other step
    stays, as it may just be finished. For the agents of the job that holds the root's lock, also several at
    once. Raises PersistentTierError.
    """
    staging = root / _OWN_NAME / "staging" / f"{step}-g{generation}-e{epoch}"
    with writing(root):
        (staging / ITEM_NAME).mkdir(parents=True, exist_ok=True)
        for other in _stale(staging):
            with contextlib.suppress(FileNotFoundError):  # another agent was faster
                _remove(root, other)
        for dead in _dead(root).iterdir():
            shutil.rmtree(dead, ignore_errors=True)
    return staging


def _stale(staging: Path) -> list[Path]:
    """Return the other staging directories that nobody finishes any more."""
    step, _, world = staging.name.partition("-")
    others = [path for path in staging.parent.iterdir() if path.name != staging.name]
    steps = {path: int(path.name.partition("-")[0]) for path in others if path.name.endswith(f"-{world}")}
    older = sorted((path for path in steps if steps[path] < int(step)), key=steps.__getitem__)
    return [path for path in others if path not in steps] + older[:-1]


def abort(root: Path, staging: Path) -> None:
    """Remove a staging directory of a snapshot that will not be finished. Raises PersistentTierError."""
    with writing(root), contextlib.suppress(FileNotFoundError):
        _remove(root, staging)


def prune(root: Path, keep: int, restored_steps: Mapping[int, int] | None = None) -> tuple[Persisted, ...]:
    """Remove all but the newest `keep` snapshots, and those the job has left; return what was removed.

    `restored_steps` maps each generation to the step it was restored from, as for `reshard.lineage`.
    What others wrote stays. Raises UsageError for `keep` below 1, PersistentTierError.
    """
    if keep < 1:
        raise UsageError(f"cannot keep {keep} snapshots: at least 1")
    found = list_persisted(root)
    epoch = max((one.facts.epoch for one in found), default=0)
    on_lineage = [one for one in found if one.is_on_lineage(epoch, restored_steps or {})]
    kept = {one.path for one in on_lineage[:keep]}
    removed = tuple(one for one in found if one.path not in kept)
    with writing(root):
        for one in removed:
            _remove(root, one.path)
    return removed


def publish(root: Path, staging: Path, step: int, restored_steps: Mapping[int, int]) -> Persisted:
    """Give a whole staging directory its name; when the step has a snapshot already, see `persist_finish`."""
    final = root / str(step)
    if final.exists():
        try:
            old = read_persisted(final)
        except CorruptCopyError as error:
            if not (final / ITEM_NAME / FACTS_NAME).exists():
                raise UsageError(
                    f"{final} exists and is not ours", remedy="Use another directory for this job."
                ) from error
            old = None
        new = decode_facts((staging / ITEM_NAME / FACTS_NAME).read_bytes())
        if old is not None and _is_as_good(old, new, restored_steps):
            _remove(root, staging)
            return old
        _remove(root, final)
    os.rename(staging, final)
    sync_directory(root)
    return read_persisted(final)


def _is_as_good(old: Persisted, new: PersistFacts, restored_steps: Mapping[int, int]) -> bool:
    """Tell whether the snapshot that is there already can stay instead of a new one of the same step."""
    if old.facts.epoch != new.epoch:
        return old.facts.epoch > new.epoch
    return old.generation >= new.generation or old.is_on_lineage(new.epoch, restored_steps)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(root: Path, path: Path) -> None:
    """Take the name away first, at once; a reader then sees all of it or nothing."""
    dead = _dead(root) / f"{path.name}-{uuid.uuid4().hex}"
    os.rename(path, dead)
    sync_directory(path.parent)
    shutil.rmtree(dead, ignore_errors=True)


def _dead(root: Path) -> Path:
    path = root / _OWN_NAME / "dead"
    path.mkdir(parents=True, exist_ok=True)
    return path
