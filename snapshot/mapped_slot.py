"""One complete slot, mapped for reading: its shards as memory, without a copy.

The mapping is read-only and shared, so nothing here can change a job's state. The engine never makes a slot
file shorter (a slot that is too small grows in place), so that the mapping stays valid for as long as it is
held, also when the file has gone. Only somebody who truncates the file by hand makes a read of the mapping
end in SIGBUS; `reader` reads by `pread` instead, and then raises an error.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16, float8 and int4 by name)
import numpy as np
import numpy.typing as npt

from reshard.boxes import Box, shape_of, volume
from reshard.errors import CorruptCopyError
from reshard.execute import element_dtype
from reshard.ids import HostId
from reshard.layout import ArrayLayout
from snapshot import slot_header as fmt
from snapshot.manifest import Manifest
from snapshot.shm import open_regular
from snapshot.slot_reader import Bytes, SlotReader

_OPEN_ATTEMPTS = 20


class MappedSlot:
    """A snapshot of one host, as it was when the slot was opened.

    `reader` reads verified copies of the same shards. Memory handed out by `shard_bytes` stays valid after
    `close`, and keeps the slot's memory alive until it is dropped.
    """

    def __init__(
        self, host: HostId, fd: int, reader: SlotReader, manifest: Manifest, header: fmt.SlotHeader
    ) -> None:
        self.host = host
        self.path = reader.path
        self.reader = reader
        self.manifest = manifest
        self._fd: int | None = fd
        self._header = header
        self._map = mmap.mmap(fd, header.end_offset, mmap.MAP_SHARED, mmap.PROT_READ)

    def shard_bytes(self, index: int) -> Bytes:
        """Return the bytes of a shard as a read-only array over the mapping; they are not verified."""
        entry = self.manifest.static.shards[index]
        start = self._header.data_offset + entry.offset
        return np.frombuffer(self._map, np.uint8, count=entry.nbytes, offset=start)

    def is_current(self) -> bool:
        """Tell whether the slot still holds this snapshot: all read before this call was of it."""
        return self._fd is not None and _commit_word(self._fd) == self._header.sequence

    def close(self) -> None:
        """Close the files; harmless when already closed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self.reader.close()
            with contextlib.suppress(BufferError):  # arrays over it are held: unmapped when they go
                self._map.close()


def open_slot(host: HostId, path: Path) -> MappedSlot | None:
    """Map the snapshot in a slot file; None when it is empty or is being written.

    Raises CorruptCopyError, saying why, for what is not an intact slot; OSError when it cannot be opened.
    """
    for _ in range(_OPEN_ATTEMPTS):
        with contextlib.ExitStack() as stack:
            fd = _open(path)
            stack.callback(os.close, fd)
            reader = stack.enter_context(SlotReader(path))
            before = _commit_word(fd)
            manifest = reader.read_manifest()
            if manifest is None:
                return None
            # The seqlock again: this descriptor shows the same commit of the same file as the reader's.
            page = os.pread(fd, fmt.HEADER_BYTES, 0)
            is_same = _is_named(fd, path) and fmt.commit_word(page) == before == _commit_word(fd)
            if is_same and before:
                header = fmt.unpack_header(page, os.fstat(fd).st_size)
                try:
                    slot = MappedSlot(host, fd, reader, manifest, header)
                except ValueError as error:  # cut short since its size was looked at
                    raise CorruptCopyError(f"{path}: truncated: {error}", path=str(path)) from error
                stack.pop_all()
                return slot
    return None


def _open(path: Path) -> int:
    try:
        return open_regular(path, os.O_RDONLY)
    except ValueError as error:
        raise CorruptCopyError(f"{path}: foreign file: {error}", path=str(path)) from error


def _commit_word(fd: int) -> int:
    page = os.pread(fd, fmt.FIELDS_OFFSET, 0)
    return fmt.commit_word(page) if len(page) == fmt.FIELDS_OFFSET else 0


def _is_named(fd: int, path: Path) -> bool:
    """Tell whether the file has this name now: then whoever opened the name since `fd` has the same file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def dtype_of(array: ArrayLayout) -> np.dtype[Any]:
    """Return numpy's dtype of an array as stored; opaque elements of its size when numpy has none."""
    try:
        dtype = np.dtype(array.dtype)
    except TypeError:
        return element_dtype(array.itemsize)
    return dtype if dtype.itemsize == array.itemsize else element_dtype(array.itemsize)


def as_elements(data: Bytes, array: ArrayLayout, box: Box) -> npt.NDArray[Any]:
    """Return a shard's bytes as an array of its box, without a copy."""
    if not volume(box):
        data = np.frombuffer(b"", np.uint8)
    return data.view(dtype_of(array)).reshape(shape_of(box))
