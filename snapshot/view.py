"""A running job's state as numpy, read where it is: nothing is copied, held up or left behind.

    with snapshot.open("runs/demo") as view:
        w = view["['params']['w']"]          # read-only, straight over the job's memory
        norm = float(np.linalg.norm(w))      # read …
        view.check()                         # … then check: raises when the job has overwritten it meanwhile

The job writes the slot that is read from again two captures later. So what is computed from an array of a
view counts only if `check` (or `is_current`) passes afterwards. `copy` and `copies` do that for you: they
return private arrays whose checksums were right (on processors other than x86-64 only they are sure).

An array over the job's memory is as safe as that file: the engine never makes one shorter. Where somebody
else may truncate it, use `copy`, which reads by `pread` and gets an error where a mapping would get SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from reshard.boxes import Box, full_box
from reshard.errors import ElasticError, MissingShardError, RetryLaterError, UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from snapshot.contents import RejectedCopy
from snapshot.job import DEFAULT_ROOT
from snapshot.locate import FoundJob, find_job
from snapshot.mapped_slot import MappedSlot, as_elements, dtype_of
from snapshot.paths import nest
from snapshot.source import ShardSource
from snapshot.view_choice import choose_slots

Elements = npt.NDArray[Any]

_COPY_ATTEMPTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedShard:
    """One stored box of an array and its elements, read-only over the memory of `host`'s arena."""

    host: HostId
    box: Box
    elements: Elements


def open(
    where: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    root: Path = DEFAULT_ROOT,
    partial: bool = False,
) -> View:
    """Open the state of a job that has snapshots on this machine; see the module for how to read it.

    `where` is a job id, a run directory, or None when exactly one live job has snapshots below `root`. The
    view shows the newest step that the hosts on this machine cover together, or `step`. With `partial` the
    newest step they hold anything of: then only some arrays can be read, others have only `shards`.

    No lock is taken on the job and no file made; the job may end and be cleaned up meanwhile. Memory that
    a view or its arrays still refer to is given back when they go.

    Raises UsageError when there is no such job or step, RetryLaterError when the job has no complete
    snapshot yet, MissingShardError, naming array and box, when no step is covered.
    """
    return View(find_job(where, root=root), step=step, partial=partial)


class View:
    """The state of one step; a context manager. Not for use by several threads at once.

    `rejected` names the slots that could not be read, and why.
    """

    def __init__(self, job: FoundJob, *, step: int | None = None, partial: bool = False) -> None:
        self.job = job
        self.rejected: tuple[RejectedCopy, ...] = ()
        self._pinned_step = step
        self._partial = partial
        self._slots: tuple[MappedSlot, ...] = ()
        self._arrays: dict[str, ArrayLayout] = {}
        self._copies: dict[str, list[tuple[MappedSlot, int]]] = {}
        self._is_closed = False
        self.refresh()

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The step this is the state after."""
        return self._slots[0].manifest.step

    @property
    def generation(self) -> int:
        """The generation that captured it."""
        return self._slots[0].manifest.generation

    @property
    def layout(self) -> Layout:
        """Mesh, shapes, dtypes and partition specs of the whole state."""
        return self._slots[0].manifest.static.layout

    def paths(self) -> tuple[str, ...]:
        """Return the names of all arrays of the state, as `jax.tree_util.keystr` writes them."""
        return tuple(self._arrays)

    def info(self, path: str) -> ArrayLayout:
        """Return shape, dtype and spec of an array. Raises UsageError for a name that is not there."""
        if path not in self._arrays:
            near = [name for name in self._arrays if path in name]
            raise UsageError(
                f"the state has no array {path!r}",
                remedy=f"It has {', '.join((near or list(self._arrays))[:5])}; `paths()` lists all.",
                path=path,
            )
        return self._arrays[path]

    def __getitem__(self, path: str) -> Elements:
        """Return an array, read-only.

        Over the job's memory, without a copy and unverified, when one stored box is all of it: read it, then
        `check`. Else put together out of verified boxes. Raises RetryLaterError when the job has overwritten
        it meanwhile, MissingShardError when a part is nowhere intact.
        """
        array = self.info(path)
        whole = full_box(array.shape)
        for shard in self.shards(path):
            if shard.box == whole:
                return shard.elements
        try:
            elements = self._read(self._source(), path)
        except MissingShardError:
            self.check()
            raise
        elements.flags.writeable = False
        return elements

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def shards(self, path: str) -> tuple[ViewedShard, ...]:
        """Return each stored box of an array on each host, over the job's memory: read, then `check`."""
        array = self.info(path)
        self._require_open()
        return tuple(
            ViewedShard(
                host=slot.host, box=entry.box, elements=as_elements(slot.shard_bytes(index), array, entry.box)
            )
            for slot, index in self._copies.get(path, ())
            if (entry := slot.manifest.static.shards[index]).nbytes == array.box_nbytes(entry.box)
        )

    def tree(self) -> dict[Any, Any]:
        """Return all arrays as nested dicts, by the keys, indexes and field names in their paths."""
        return nest({path: self[path] for path in self._arrays})

    def is_current(self) -> bool:
        """Tell whether all that was read from this view so far was of its step: nothing was overwritten."""
        self._require_open()
        return all(slot.is_current() for slot in self._slots)

    def check(self) -> None:
        """Raise RetryLaterError unless `is_current`."""
        if not self.is_current():
            raise RetryLaterError(
                f"step {self.step} of job {self.job.job_id} was overwritten while it was read",
                remedy="Call refresh() and read again, or take a copy().",
                step=self.step,
            )

    def refresh(self) -> None:
        """Go to the newest covered step (a view opened at a given step stays there).

        Arrays got before keep showing the memory of the old step. Raises what `open` raises; the view is
        then as it was.
        """
        self._require_open()
        slots, rejected = choose_slots(self.job, self._pinned_step, partial=self._partial)
        for slot in self._slots:
            slot.close()
        self._slots, self.rejected, self._copies = slots, rejected, {}
        self._arrays = {array.path: array for array in self.layout.arrays}
        for slot in slots:
            for index, entry in enumerate(slot.manifest.static.shards):
                self._copies.setdefault(entry.path, []).append((slot, index))

    def copy(self, path: str) -> Elements:
        """Return a private copy of one array, its checksum verified; afterwards `step` says of which step."""
        return self.copies((path,))[path]

    def copies(self, paths: Iterable[str] | None = None) -> dict[str, Elements]:
        """Return private, verified copies of some arrays, or all, of one step: `step`, afterwards.

        When the job overwrites them meanwhile, the view goes on to the newest step and reads again. Raises
        RetryLaterError when that happens too often, or at once for a view of a given step; MissingShardError,
        naming array and box, when no intact copy is left.
        """
        names = self.paths() if paths is None else tuple(paths)
        failed: ElasticError | None = None
        for _ in range(_COPY_ATTEMPTS):
            for name in names:
                self.info(name)
            source = self._source()
            try:
                return {name: self._read(source, name) for name in names}
            except MissingShardError as error:
                if self.is_current():
                    raise
                failed = error
            if self._pinned_step is not None:
                self.check()
            self.refresh()
        raise RetryLaterError(
            f"job {self.job.job_id} overwrote its snapshots {_COPY_ATTEMPTS} times while they were read",
            remedy="Copy fewer arrays at a time; its steps are shorter than the copy.",
        ) from failed

    def close(self) -> None:
        """Close the files; arrays that are held stay valid. Harmless when already closed."""
        for slot in self._slots:
            slot.close()
        self._is_closed = True

    def _source(self) -> ShardSource:
        self._require_open()
        return ShardSource(self.step, [(slot.reader, slot.manifest) for slot in self._slots])

    def _read(self, source: ShardSource, path: str) -> Elements:
        array = self._arrays[path]
        return source.read(path, full_box(array.shape)).view(dtype_of(array))

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"this view of job {self.job.job_id} is closed", remedy="Open another one.")
