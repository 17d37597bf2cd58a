"""Reading boxes of a persisted snapshot: for a restore, for a peer, or into an agent's stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from reshard.boxes import Box, shape_of, volume
from reshard.errors import ElasticError, MissingShardError, UsageError
from reshard.execute import element_dtype
from reshard.layout import ArrayLayout
from snapshot.contents import RejectedCopy
from snapshot.persist_errors import read_error
from snapshot.persist_format import ITEM_NAME, StoredArray
from snapshot.persist_list import read_persisted
from snapshot.persist_store import MAX_BYTES_IN_FLIGHT, chunk_files, open_array, stored_arrays

Elements = np.ndarray[Any, np.dtype[Any]]
Request = tuple[str, Box, Any]
"""An array's path, a box of it, and a writable C-contiguous buffer of the box's bytes."""


class PersistentSource:
    """A complete snapshot in the persistent tier; a `snapshot.restore.BoxSource`.

    Whatever is read is checked by the CRC32C of its chunks. Elements are opaque values of the array's item
    size. Raises CorruptCopyError, saying why, when `path` is not one. May be used by several threads.
    """

    def __init__(self, path: Path) -> None:
        self.persisted = read_persisted(path)
        self.step = self.persisted.step
        self.generation = self.persisted.generation
        self.position = self.persisted.position
        self.arrays: dict[str, ArrayLayout] = {array.path: array for array in self.persisted.layout.arrays}
        self._stored = stored_arrays(self.persisted.layout, self.persisted.facts.tree)
        self._stores: dict[str, Any] = {}
        self.rejected: list[str] = []

    def read(self, path: str, box: Box) -> Elements:
        """Return a private C-order array of the box's elements.

        Raises MissingShardError when a chunk of it is gone or the state has no such array, CorruptCopyError
        naming the array when one is damaged.
        """
        array = self.arrays.get(path)
        if array is None:
            raise MissingShardError(path, box, self.step)
        result = np.empty(shape_of(box), element_dtype(array.itemsize))
        self.read_into([(path, box, result)])
        return result

    def boxes(self, path: str) -> tuple[Box, ...]:
        """Return the boxes that `path` was written in."""
        array = self.arrays.get(path)
        return () if array is None else tuple(sorted(set(self.persisted.layout.boxes(array))))

    def read_stored(self, path: str, box: Box, out: Any) -> bool:
        """Read one of `boxes` into `out`, bytes in C order; False, and why in `rejected`, if it cannot."""
        try:
            self.read_into([(path, box, out)])
        except ElasticError as error:
            self.rejected.append(error.message)
            return False
        return True

    read_piece = read
    """Any box may be asked for; the name is the one that `ShardSource` has for pieces of a stored shard."""

    def read_into(self, requests: Iterable[Request]) -> None:
        """Fill the buffer of each request, several at a time. Raises as `read`; buffers are then undefined.

        Which error is raised is that of the first request that failed, in their order.
        """
        pending: deque[tuple[Any, str, Box, int]] = deque()
        in_flight = 0
        for path, box, buffer in requests:
            if path not in self._stored:
                raise MissingShardError(path, box, self.step)
            if not volume(box):
                continue
            pending.append((self._start(path, box, buffer), path, box, self.arrays[path].box_nbytes(box)))
            in_flight += pending[-1][3]
            while in_flight > MAX_BYTES_IN_FLIGHT:
                in_flight -= self._wait_oldest(pending)
        while pending:
            self._wait_oldest(pending)

    def verify(self) -> tuple[RejectedCopy, ...]:
        """Read everything and return the chunks that are missing or damaged."""
        rejected: list[RejectedCopy] = []
        for path, (_, form) in self._stored.items():
            for _, box in chunk_files(form.array, form):
                try:
                    self.read(path, box)
                except Exception as error:  # whatever a damaged file leads to
                    rejected.append(RejectedCopy(name=path, reason=str(getattr(error, "message", error))))
        return tuple(rejected)

    def _start(self, path: str, box: Box, buffer: Any) -> Any:
        form = self._stored[path][1]
        try:
            store = self._store(path, form)
            target = self._target(path, box, buffer, store.dtype.numpy_dtype)
            return ts.array(target, copy=False).write(store[form.stored_slices(box)])
        except ValueError as error:
            raise read_error(error, path, box, self.step) from error

    def _target(self, path: str, box: Box, buffer: Any, dtype: np.dtype[Any]) -> Elements:
        form = self._stored[path][1]
        flat = np.frombuffer(buffer, np.uint8) if not isinstance(buffer, np.ndarray) else buffer
        if (
            flat.nbytes != form.array.box_nbytes(box)
            or not flat.flags.c_contiguous
            or not flat.flags.writeable
        ):
            raise UsageError(
                f"buffer for {path!r} is no writable memory of {form.array.box_nbytes(box)} bytes"
            )
        return flat.reshape(-1).view(np.uint8).view(dtype).reshape(form.stored_shape(box))

    def _store(self, path: str, form: StoredArray) -> Any:
        if path not in self._stores:
            directory = self.persisted.path / ITEM_NAME / self._stored[path][0]
            self._stores[path] = open_array(directory, form.shape, form.dtype).result()
        return self._stores[path]

    def _wait_oldest(self, pending: deque[tuple[Any, str, Box, int]]) -> int:
        future, path, box, nbytes = pending.popleft()
        try:
            future.result()
        except ValueError as error:
            raise read_error(error, path, box, self.step) from error
        return nbytes
