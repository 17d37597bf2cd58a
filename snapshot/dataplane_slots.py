"""The complete slots of an arena, kept parsed, and reading their shards in blocks.

What was parsed is kept while the slot holds the same commit, so that many small requests are cheap. Files are
open during a request only: one that a larger slot has replaced would keep its memory.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import cast

import numpy as np
import xxhash

from reshard.boxes import Box, contains, format_box, volume
from reshard.errors import CorruptCopyError
from snapshot.arena import Arena
from snapshot.manifest import Manifest
from snapshot.slot_reader import SlotReader

BLOCK_BYTES = 1 << 20


class SlotIndex:
    """A parsed manifest: its arrays by path, and which shards are of each."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.arrays = {array.path: array for array in manifest.static.layout.arrays}
        self.indexes: defaultdict[str, list[int]] = defaultdict(list)
        for index, entry in enumerate(manifest.static.shards):
            self.indexes[entry.path].append(index)


class OpenSlot:
    """A complete slot that one request reads from. Close it: a file that is open keeps its memory."""

    def __init__(self, reader: SlotReader, index: SlotIndex) -> None:
        self.reader = reader
        self.manifest = index.manifest
        self.arrays = index.arrays
        self._indexes = index.indexes

    def close(self) -> None:
        """Close the file."""
        self.reader.close()

    def holders(self, path: str, box: Box) -> list[int]:
        """Return the shards that have all of `box`, the smallest first."""
        shards = self.manifest.static.shards
        found = [
            index
            for index in self._indexes.get(path, ())
            if len(shards[index].box) == len(box) and contains(shards[index].box, box)
        ]
        return sorted(found, key=lambda index: volume(shards[index].box))

    def check(self, index: int) -> str:
        """Read a shard in blocks; return why it is not intact, empty when it is."""
        entry = self.manifest.static.shards[index]
        fd, offset, nbytes = self.reader.shard_location(index)
        name = (
            f"{self.reader.path}: step {self.manifest.step}: bytes of {entry.path!r} {format_box(entry.box)}"
        )
        if hash_range(fd, offset, nbytes) == self.manifest.checksums[index]:
            return ""
        if not self.reader.is_unchanged():
            return f"{name} were overwritten"
        return f"{name} do not match their checksum"


class SlotCache:
    """The slots of an arena, parsed once for each commit. For use by several threads."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._parsed: dict[Path, tuple[SlotReader, SlotIndex]] = {}

    def open(self) -> tuple[list[OpenSlot], list[str]]:
        """Open the complete slots, which workers captured; also return why others are not readable."""
        found: list[OpenSlot] = []
        rejected: list[str] = []
        with self._lock:
            for path in self._arena.captured_files():
                try:
                    slot = self._open_slot(path)
                except FileNotFoundError:
                    continue
                except (OSError, CorruptCopyError) as error:
                    rejected.append(str(error))
                    continue
                if slot is not None:
                    found.append(slot)
        return found, rejected

    def _open_slot(self, path: Path) -> OpenSlot | None:
        reader = SlotReader(path)
        try:
            earlier, index = self._parsed.get(path, (None, None))
            if earlier is not None and index is not None and reader.take_over(earlier) is not None:
                return OpenSlot(reader, index)
            manifest = reader.read_manifest()
            if manifest is None:
                reader.close()
                return None
            index = SlotIndex(manifest)
        except BaseException:
            reader.close()
            raise
        self._parsed[path] = reader, index
        return OpenSlot(reader, index)


def read_range(fd: int, offset: int, nbytes: int) -> bytes:
    """Read bytes of a file; fewer only at its end."""
    parts: list[bytes] = []
    while nbytes > 0 and (data := os.pread(fd, nbytes, offset)):
        parts.append(data)
        offset, nbytes = offset + len(data), nbytes - len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def hash_range(fd: int, offset: int, nbytes: int) -> int:
    """Return the checksum of bytes of a file, read in blocks; of fewer when the file ends before."""
    digest = xxhash.xxh3_64()
    block = np.empty(min(nbytes, BLOCK_BYTES), np.uint8)
    view = memoryview(cast("bytearray", block))
    while nbytes > 0:
        got = os.preadv(fd, [view[: min(nbytes, len(view))]], offset)
        if got == 0:
            break
        digest.update(cast("bytes", block[:got]))
        offset, nbytes = offset + got, nbytes - got
    return digest.intdigest()
