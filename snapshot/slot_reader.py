"""Reading one slot, at any moment, whatever its bytes are.

The worker may overwrite a slot while the agent reads it: a seqlock. The commit word is read before and
after, and everything read is covered by a checksum, so that a torn read is always noticed. `pread` and
not a mapping, since reading the mapping of a file that somebody truncated ends in SIGBUS.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from reshard.boxes import format_box
from reshard.errors import CorruptCopyError, UsageError
from snapshot import slot_header as fmt
from snapshot.checksum import checksum
from snapshot.copying import BLOCK_BYTES
from snapshot.manifest import Manifest, ShardEntry, decode_static
from snapshot.shm import open_regular
from snapshot.slot_header import SlotHeader

Bytes = npt.NDArray[np.uint8]

_READ_ATTEMPTS = 3


class SlotReader:
    """Reads one slot that another process may be writing; works on any bytes without harm.

    Raises CorruptCopyError, saying why, for what is not a slot or not intact; OSError when the file
    cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd: int | None = open_regular(path, os.O_RDONLY)
        except ValueError as error:
            raise CorruptCopyError(f"{path}: foreign file: {error}", path=str(path)) from error
        self._manifest: Manifest | None = None
        self._header: SlotHeader | None = None
        self._last_word = 0
        self._prefix = b""

    def __enter__(self) -> SlotReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def read_manifest(self) -> Manifest | None:
        """Return the manifest of a complete snapshot, None when the slot is empty or being written."""
        for _ in range(_READ_ATTEMPTS):
            try:
                manifest = self._read_once()
            except CorruptCopyError as error:
                if self._commit_word() != self._last_word:
                    continue
                raise CorruptCopyError(f"{self.path}: {error.message}", path=str(self.path)) from error
            if self._commit_word() == self._last_word:
                self._manifest = manifest
                return manifest
        return None

    def take_over(self, earlier: SlotReader) -> Manifest | None:
        """Return the manifest that another reader has read, if this slot still holds it, without parsing it.

        Commit word and header checksum, which cover it all, must be the same. `earlier` may be closed.
        """
        if not earlier._prefix or self._pread(fmt.FIELDS_OFFSET, 0) != earlier._prefix:
            return None
        self._prefix, self._header, self._manifest = earlier._prefix, earlier._header, earlier._manifest
        return self._manifest

    def read_shard(self, index: int, *, verify: bool = True) -> Bytes:
        """Return a private copy of the bytes of shard `index` of the manifest last read.

        Raises CorruptCopyError when the slot was overwritten meanwhile or the checksum differs.
        """
        data = np.empty(self._entry(index).nbytes, dtype=np.uint8)
        self.read_shard_into(index, data, verify=verify)
        return data

    def read_shard_into(self, index: int, out: Bytes, *, verify: bool = True) -> None:
        """Read the bytes of shard `index` of the manifest last read into `out`, of exactly its size.

        Each block is hashed as it comes, while it is in the processor's cache. Several threads may read at
        once. Raises CorruptCopyError when the slot was overwritten meanwhile or the checksum differs: `out`
        holds anything then.
        """
        if len(out) != self._entry(index).nbytes:
            raise UsageError(f"{self.path}: {len(out)} bytes for a shard of {self._entry(index).nbytes}")
        self._read_blocks(index, lambda start: out[start : start + BLOCK_BYTES], verify=verify)

    def check_shard(self, index: int) -> None:
        """Read shard `index` of the manifest last read and verify it, in the memory of one block.

        Raises CorruptCopyError as `read_shard_into` does.
        """
        nbytes = self._entry(index).nbytes
        block = np.empty(min(nbytes, BLOCK_BYTES), np.uint8)
        self._read_blocks(index, lambda start: block[: nbytes - start], verify=True)

    def shard_location(self, index: int) -> tuple[int, int, int]:
        """Return the descriptor, and offset and bytes in the file, of shard `index` of the manifest last
        read.

        For sending without a copy. What is there counts only while `is_unchanged`, and if it matches the
        manifest's checksum.
        """
        if self._manifest is None or self._header is None:
            raise UsageError(f"{self.path}: shard_location without a manifest; call read_manifest first")
        entry = self._manifest.static.shards[index]
        return self._descriptor(), self._header.data_offset + entry.offset, entry.nbytes

    def is_unchanged(self) -> bool:
        """Tell whether the slot still holds the snapshot whose manifest was last read."""
        return self._header is not None and self._commit_word() == self._header.sequence

    def close(self) -> None:
        """Close the file; harmless when already closed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _entry(self, index: int) -> ShardEntry:
        if self._manifest is None:
            raise UsageError(f"{self.path}: read_shard without a manifest; call read_manifest first")
        return self._manifest.static.shards[index]

    def _read_blocks(self, index: int, block_at: Callable[[int], Bytes], *, verify: bool) -> None:
        """Read a shard into the blocks for each offset in it, one after the other."""
        entry, manifest, header = self._entry(index), self._manifest, self._header
        assert manifest is not None  # or `_entry` would have said so
        first = 0 if header is None else header.data_offset + entry.offset
        intact = self.is_unchanged()
        digest = xxhash.xxh3_64()
        for start in range(0, entry.nbytes if intact else 0, BLOCK_BYTES):
            block = block_at(start)
            intact = self._pread_into(block, first + start) == len(block)
            if not intact:
                break
            if verify:
                digest.update(cast("bytes", block))
        if not intact or not self.is_unchanged():
            raise CorruptCopyError(f"{self.path}: overwritten while {entry.path!r} was read", path=entry.path)
        if verify and digest.intdigest() != manifest.checksums[index]:
            raise CorruptCopyError(
                f"{self.path}: step {manifest.step}: bytes of {entry.path!r} {format_box(entry.box)} "
                "do not match their checksum",
                path=entry.path,
                box=entry.box,
                step=manifest.step,
            )

    def _read_once(self) -> Manifest | None:
        self._header, self._prefix = None, b""
        page = self._pread(fmt.HEADER_BYTES, 0)
        self._last_word = fmt.commit_word(page) if len(page) >= fmt.FIELDS_OFFSET else 0
        fmt.check_prefix(page)
        if self._last_word == 0:
            return None
        header = fmt.unpack_header(page, os.fstat(self._descriptor()).st_size)
        table = self._pread(header.table_bytes, header.table_offset)
        fmt.check_header(page, table)
        encoded = self._pread(header.static_bytes, header.static_offset)
        if checksum(encoded) != header.static_checksum:
            raise CorruptCopyError("bad static manifest checksum")
        static = decode_static(encoded, data_bytes=header.data_bytes)
        if len(static.shards) != header.num_shards:
            raise CorruptCopyError(f"{header.num_shards} checksums for {len(static.shards)} shards")
        self._header, self._prefix = header, page[: fmt.FIELDS_OFFSET]
        checksums = struct.unpack(f"<{header.num_shards}Q", table)
        return Manifest(
            static=static,
            step=header.step,
            generation=header.generation,
            position=header.position,
            checksums=checksums,
        )

    def _descriptor(self) -> int:
        if self._fd is None:
            raise UsageError(f"{self.path}: reader is closed")
        return self._fd

    def _commit_word(self) -> int:
        page = self._pread(fmt.FIELDS_OFFSET, 0)
        return fmt.commit_word(page) if len(page) == fmt.FIELDS_OFFSET else 0

    def _pread(self, nbytes: int, offset: int) -> bytes:
        return os.pread(self._descriptor(), nbytes, offset)

    def _pread_into(self, target: Bytes, offset: int) -> int:
        done = 0
        view = memoryview(cast("bytearray", target))
        while done < len(target):
            got = os.preadv(self._descriptor(), [view[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done
