"""The complete slots of an arena, kept open and parsed, and reading their shards in blocks.

A slot stays open while it is the same file with the same commit word, so that many small requests are cheap.
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


class OpenSlot:
    """A complete slot, open and parsed; closed when its last user lets it go, as others may be reading it."""

    def __init__(self, reader: SlotReader, manifest: Manifest, identity: tuple[int, int]) -> None:
        self.reader = reader
        self.manifest = manifest
        self.identity = identity
        self.arrays = {array.path: array for array in manifest.static.layout.arrays}
        self.indexes: defaultdict[str, list[int]] = defaultdict(list)
        for index, entry in enumerate(manifest.static.shards):
            self.indexes[entry.path].append(index)

    def __del__(self) -> None:
        self.reader.close()

    def holders(self, path: str, box: Box) -> list[int]:
        """Return the shards that have all of `box`, the smallest first."""
        shards = self.manifest.static.shards
        found = [
            index
            for index in self.indexes.get(path, ())
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
    """The complete slots of an arena, opened and parsed once for each commit. For use by several threads."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._open: dict[Path, OpenSlot] = {}

    def slots(self) -> tuple[list[OpenSlot], list[str]]:
        """Return the complete slots, and why others are not readable."""
        found: list[OpenSlot] = []
        rejected: list[str] = []
        with self._lock:
            paths = self._arena.slot_files()
            for gone in set(self._open) - set(paths):
                del self._open[gone]
            for path in paths:
                try:
                    slot = self._slot(path)
                except (OSError, CorruptCopyError) as error:
                    self._open.pop(path, None)
                    if not isinstance(error, FileNotFoundError):
                        rejected.append(str(error))
                    continue
                if slot is not None:
                    found.append(slot)
        return found, rejected

    def close(self) -> None:
        """Let go of all slots."""
        with self._lock:
            self._open.clear()

    def _slot(self, path: Path) -> OpenSlot | None:
        info = os.stat(path, follow_symlinks=False)
        identity = (info.st_dev, info.st_ino)
        slot = self._open.get(path)
        if slot is not None and slot.identity == identity and slot.reader.is_unchanged():
            return slot
        self._open.pop(path, None)
        reader = SlotReader(path)
        try:
            info = os.fstat(reader.fileno())
            manifest = reader.read_manifest()
        except BaseException:
            reader.close()
            raise
        if manifest is None:
            reader.close()
            return None
        slot = self._open[path] = OpenSlot(reader, manifest, (info.st_dev, info.st_ino))
        return slot


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
