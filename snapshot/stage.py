"""The stage: a slot file that is filled with what comes from peers, in its own memory, and replaced as one.

Bytes are received straight into the file's mapping. Until `commit` it has another name, so that what was
staged before stays; a stage that was begun later wins.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from reshard.boxes import Box
from reshard.errors import RetryLaterError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.manifest import Manifest, encode_static, make_static
from snapshot.slot import SlotWriter, allocate_slot, required_bytes

_naming = threading.Lock()
"""Held while a file gets a name that another stage of this process may want too."""


class StageWriter:
    """A new stage: fill `shard_views[i]` with the bytes of shard i, then `commit`, else `discard`.

    As a context manager it discards what was not committed. The views end with either.
    """

    def __init__(self, path: Path, host: HostId, layout: Layout, shards: Sequence[tuple[str, Box]]) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".part")
        self._static = make_static(host, layout, shards)
        with _naming:
            allocate_slot(self._temporary, required_bytes(self._static))
            self._writer = SlotWriter(self._temporary)
        self._writer.prepare(self._static, encode_static(self._static))

    def __enter__(self) -> StageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.discard()

    @property
    def shard_views(self) -> tuple[memoryview, ...]:
        """The writable memory of each shard, in the order given."""
        return self._writer.shard_views

    def commit(self, *, step: int, generation: int, position: int, checksums: Sequence[int]) -> Manifest:
        """Make this the stage, in place of what was staged before; `checksums` are those of the shards.

        Raises RetryLaterError when another stage was begun meanwhile.
        """
        sums = tuple(checksums)
        self._writer.commit(step=step, generation=generation, position=position, checksums=sums)
        with _naming:
            if not self._has_name():
                raise RetryLaterError(f"{self._path}: another stage was begun while this one was filled")
            os.rename(self._temporary, self._path)
        self._writer.close()
        return Manifest(
            static=self._static, step=step, generation=generation, position=position, checksums=sums
        )

    def discard(self) -> None:
        """Drop what was not committed; harmless after `commit`."""
        with _naming:
            if self._has_name():
                self._temporary.unlink()
        self._writer.close()

    def _has_name(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(self._temporary, follow_symlinks=False)
            return (info.st_dev, info.st_ino) == self._writer.identity[:2]
        return False
