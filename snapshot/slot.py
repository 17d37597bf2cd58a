"""Writing one slot: a file that holds one host's shards of one step, or nothing.

The worker writes through a mapping of its own. The commit word is cleared first and written last, and
the kernel keeps what a killed process wrote, in order: so a slot whose commit word is set is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from reshard.errors import UsageError
from snapshot import slot_header as fmt
from snapshot.checksum import checksum
from snapshot.manifest import Manifest, StaticManifest, encode_static
from snapshot.shm import allocate_file, map_writable, open_regular
from snapshot.slot_header import SlotHeader

Bytes = npt.NDArray[np.uint8]

_COMMIT_INDEX = fmt.COMMIT_OFFSET // 8
_CHECKSUM_INDEX = fmt.CHECKSUM_OFFSET // 8
_SEQUENCE_INDEX = fmt.FIELDS_OFFSET // 8
_HEAD = struct.Struct("<4Q")


def allocate_slot(path: Path, nbytes: int) -> None:
    """Make an empty slot file of at least `nbytes`. Raises InsufficientMemoryError."""
    allocate_file(path, max(nbytes, fmt.HEADER_BYTES), fmt.PREFIX)


def empty_slot(path: Path) -> None:
    """Make an existing file a slot that holds nothing, whatever its first bytes were."""
    fd = open_regular(path, os.O_RDWR)
    try:
        os.pwrite(fd, fmt.PREFIX.ljust(fmt.FIELDS_OFFSET, b"\0"), 0)
    finally:
        os.close(fd)


def required_bytes(static: StaticManifest) -> int:
    """Return the size of the slot file that can hold these shards."""
    return fmt.slot_bytes(len(encode_static(static)), len(static.shards), static.data_bytes)


class SlotWriter:
    """A writable mapping of one slot; the only writer of that file.

    The order of a capture is `prepare` (once per static manifest), `begin`, fill the shards, `commit`.
    From `begin` to `commit` the slot holds nothing. `shard_views[i]` is the writable memory of shard i and
    `shard_addresses[i]` where it is in this process, for a plain memory copy; both end with `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map, self.identity = map_writable(path)
        self.capacity_bytes = len(self._map)
        self._view = memoryview(self._map)
        self._words = self._view.cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.shard_views: tuple[memoryview, ...] = ()
        self.shard_addresses: tuple[int, ...] = ()
        self._static: bytes | None = None
        self._header = SlotHeader(*(0,) * 11)
        self._fixed_fields = b""
        self._table_offset = 0
        self._table = struct.Struct("")

    @property
    def is_complete(self) -> bool:
        """Whether the slot claims to hold a snapshot (claims: nothing is verified here)."""
        return bool(self._words[_COMMIT_INDEX])

    @property
    def order(self) -> tuple[int, int]:
        """(generation, step) of what the slot claims to hold; (-1, -1) when empty."""
        if not self.is_complete:
            return -1, -1
        return self._words[_SEQUENCE_INDEX + 2], self._words[_SEQUENCE_INDEX + 1]

    def prepare(self, static: StaticManifest, encoded: bytes) -> None:
        """Make the slot ready for these shards; what it held is gone, unless it is ready already.

        Raises UsageError when the slot is too small.
        """
        if self._static == encoded and self._is_as_prepared():
            return
        static_offset, table_offset, data_offset = fmt.lay_out(len(encoded), len(static.shards))
        if data_offset + static.data_bytes > self.capacity_bytes:
            raise UsageError(
                f"slot {self.path} has {self.capacity_bytes} bytes, {required_bytes(static)} are needed"
            )
        self.begin()
        header = SlotHeader(
            sequence=self._words[_SEQUENCE_INDEX],
            step=0,
            generation=0,
            position=0,
            static_offset=static_offset,
            static_bytes=len(encoded),
            static_checksum=checksum(encoded),
            table_offset=table_offset,
            num_shards=len(static.shards),
            data_offset=data_offset,
            data_bytes=static.data_bytes,
        )
        fields = fmt.pack_fields(header)
        self._view[0 : fmt.COMMIT_OFFSET] = fmt.PREFIX
        self._view[fmt.FIELDS_OFFSET : fmt.HEADER_BYTES] = fields
        self._header = header
        self._fixed_fields = fields[_HEAD.size :]
        self._view[static_offset : static_offset + len(encoded)] = encoded
        self._table_offset = table_offset
        self._table = struct.Struct(f"<{len(static.shards)}Q")
        self._point_at(static, data_offset)
        self._static = encoded

    def _is_as_prepared(self) -> bool:
        """Whether what stays the same from step to step is still there: others may have damaged it."""
        header = self._header
        start = fmt.FIELDS_OFFSET + _HEAD.size
        is_intact = self._view[: fmt.COMMIT_OFFSET] == fmt.PREFIX
        is_intact = is_intact and self._view[start : fmt.HEADER_BYTES] == self._fixed_fields
        static = self._view[header.static_offset : header.static_offset + header.static_bytes]
        return is_intact and checksum(static) == header.static_checksum

    def begin(self) -> None:
        """Mark the slot as being written: until `commit` it holds no snapshot."""
        self._words[_COMMIT_INDEX] = 0

    discard = begin

    def commit(self, *, step: int, generation: int, position: int, checksums: Sequence[int]) -> None:
        """Write table and header, then, last of all, the commit word."""
        if self._static is None:
            raise UsageError(f"slot {self.path} was committed before it was prepared")
        words, view = self._words, self._view
        words[_COMMIT_INDEX] = 0
        sequence = (words[_SEQUENCE_INDEX] + 1) % 2**64 or 1
        table = self._table.pack(*checksums)
        view[fmt.FIELDS_OFFSET : fmt.FIELDS_OFFSET + _HEAD.size] = _HEAD.pack(
            sequence, step, generation, position
        )
        view[self._table_offset : self._table_offset + len(table)] = table
        covered = view[fmt.FIELDS_OFFSET : fmt.HEADER_BYTES]
        words[_CHECKSUM_INDEX] = fmt.header_checksum(view[: fmt.COMMIT_OFFSET], covered, table)
        words[_COMMIT_INDEX] = sequence

    def hold(self) -> memoryview:
        """Return a view that keeps the memory mapped, even beyond `close`, until it is released.

        For a thread that writes by address while others may close the slot: `commit` then raises ValueError.
        """
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap the slot; harmless when already closed."""
        if self._map.closed:
            return
        self._release_views()
        self._words.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # a shard view is still held: unmapped when it goes
            self._map.close()

    def _point_at(self, static: StaticManifest, data_offset: int) -> None:
        self._release_views()
        starts = [data_offset + entry.offset for entry in static.shards]
        self.shard_views = tuple(
            self._view[start : start + entry.nbytes]
            for start, entry in zip(starts, static.shards, strict=True)
        )
        self.shard_addresses = tuple(self._address + start for start in starts)

    def _release_views(self) -> None:
        for view in self.shard_views:
            view.release()
        self.shard_views = ()


def write_slot(
    path: Path,
    static: StaticManifest,
    shards: Sequence[Bytes | bytes | memoryview],
    *,
    step: int,
    generation: int,
    position: int,
) -> Manifest:
    """Make a slot file at `path` with these shards in one go, replacing it only when complete."""
    temporary = path.with_name(path.name + ".part")
    allocate_slot(temporary, required_bytes(static))
    writer = SlotWriter(temporary)
    try:
        writer.prepare(static, encode_static(static))
        checksums: list[int] = []
        for entry, view, data in zip(static.shards, writer.shard_views, shards, strict=True):
            payload = memoryview(cast("bytes", data)).cast("B") if len(data) else memoryview(b"")
            if payload.nbytes != entry.nbytes:
                raise UsageError(
                    f"shard of {entry.path!r} has {payload.nbytes} bytes, its box needs {entry.nbytes}"
                )
            view[:] = payload
            checksums.append(checksum(view))
        writer.commit(step=step, generation=generation, position=position, checksums=checksums)
    except BaseException:
        writer.close()
        temporary.unlink(missing_ok=True)
        raise
    writer.close()
    os.rename(temporary, path)
    return Manifest(
        static=static, step=step, generation=generation, position=position, checksums=tuple(checksums)
    )
