"""Finding what a peer asks for in the slot files of an arena, and reading it in blocks.

A slot stays open and parsed while it is the same file with the same commit word, so that many small requests
are cheap. Whole shards are sent as they are, under the checksum of their capture. A piece of a shard has no
checksum of its own: the shard is verified first, then the piece is hashed.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import xxhash

from reshard.boxes import Box, contains, format_box, shape_of, volume
from reshard.errors import CorruptCopyError
from reshard.execute import element_dtype
from snapshot.arena import Arena
from snapshot.dataplane_wire import Covers, ReadRequest, Status, WantedRange
from snapshot.manifest import Manifest
from snapshot.slot_reader import SlotReader

BLOCK_BYTES = 1 << 20

Ranges = tuple[tuple[int, int], ...]


class Refusal(Exception):
    """A want that cannot be served: the status and text of its head."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


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


@dataclass(frozen=True, slots=True)
class Found:
    """Where a wanted range is: shard `index` of `slot`, from which `ranges` cuts the box."""

    slot: OpenSlot
    index: int
    want: WantedRange
    box_bytes: int
    itemsize: int
    ranges: Ranges
    """The box, relative to the shard."""
    strides: tuple[int, ...]
    """Of the shard, in elements."""

    @property
    def is_whole_shard(self) -> bool:
        """Whether the box is the stored shard."""
        return self.slot.manifest.static.shards[self.index].nbytes == self.box_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether the box is one run of bytes of the shard."""
        return span(self.ranges, self.strides)[1] * self.itemsize == self.box_bytes

    @property
    def covers(self) -> Covers:
        """What the trailer's checksum is of."""
        return Covers.BOX if self.is_whole_shard else Covers.RANGE

    def location(self) -> tuple[int, int]:
        """Return the descriptor and the offset of the first byte of a contiguous box."""
        fd, offset, _ = self.slot.reader.shard_location(self.index)
        return fd, offset + span(self.ranges, self.strides)[0] * self.itemsize

    def cut(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset in the box, bytes) of what overlaps the wanted range, in order, in blocks."""
        fd, offset, _ = self.slot.reader.shard_location(self.index)
        at, size = 0, self.itemsize
        dtype = element_dtype(size)
        for part in slabs(self.ranges, self.strides, max(1, BLOCK_BYTES // size)):
            nbytes = volume(part) * size
            if at < self.want.stop and at + nbytes > self.want.start:
                first, length = span(part, self.strides)
                data = read_range(fd, offset + first * size, length * size)
                if len(data) < length * size:
                    raise OSError(f"{self.slot.reader.path} became shorter")
                view = np.lib.stride_tricks.as_strided(
                    np.frombuffer(data, dtype),
                    shape_of(part),
                    tuple(stride * size for stride in self.strides),
                    writeable=False,
                )
                yield at, view.tobytes()
            at += nbytes


@dataclass(slots=True)
class Finder:
    """Answers the wants of one request; a shard is verified once a request."""

    request: ReadRequest
    slots: list[OpenSlot]
    rejected: list[str]
    _checked: dict[tuple[int, int], str] = field(default_factory=dict)

    def find(self, want: WantedRange) -> Found:
        """Return where a range is. Raises Refusal."""
        matching = [slot for slot in self.slots if self._is_wanted(slot.manifest)]
        if not matching:
            raise self._absent()
        candidates = [(slot, index) for slot in matching for index in slot.holders(want.path, want.box)]
        candidates.sort(key=lambda found: found[0].manifest.static.shards[found[1]].nbytes)
        reasons: list[str] = []
        for slot, index in candidates:
            found = _locate(slot, index, want)
            if found.is_whole_shard and not want.verify:
                return found  # the receiver verifies it
            reason = self._check(slot, index)
            if not reason:
                return found
            reasons.append(reason)
        if not reasons:
            raise Refusal(Status.MISSING, f"no shard here has {want.path!r} {format_box(want.box)}")
        if all(reason.endswith("were overwritten") for reason in reasons):
            raise Refusal(Status.OVERWRITTEN, reasons[0])
        raise Refusal(Status.CORRUPT, "; ".join(reasons[:3]))

    def _is_wanted(self, manifest: Manifest) -> bool:
        wanted = self.request
        return manifest.step == wanted.step and wanted.of_generation in (None, manifest.generation)

    def _absent(self) -> Refusal:
        request = self.request
        if request.of_generation is None:
            went_on = any(slot.manifest.step > request.step for slot in self.slots)
        else:
            order = (request.of_generation, request.step)
            went_on = any(slot.manifest.order > order for slot in self.slots)
        held = ", ".join(sorted(str(slot.manifest.step) for slot in self.slots)) or "none"
        text = "; ".join([f"step {request.step} is not here (held: {held})", *self.rejected[:3]])
        if self.rejected:
            return Refusal(Status.CORRUPT, text)
        return Refusal(Status.OVERWRITTEN if went_on else Status.NOT_YET, text)

    def _check(self, slot: OpenSlot, index: int) -> str:
        key = (id(slot), index)
        if key not in self._checked:
            self._checked[key] = slot.check(index)
        return self._checked[key]


def _locate(slot: OpenSlot, index: int, want: WantedRange) -> Found:
    entry = slot.manifest.static.shards[index]
    array = slot.arrays[entry.path]
    box_bytes = volume(want.box) * array.itemsize
    if not 0 <= want.start <= want.stop <= box_bytes or not 0 <= want.skip <= want.stop - want.start:
        raise Refusal(
            Status.BAD_REQUEST, f"bytes {want.start}:{want.stop} of a box of {box_bytes} bytes are wanted"
        )
    shape = shape_of(entry.box)
    if math.prod(shape) * array.itemsize != entry.nbytes:
        raise Refusal(Status.CORRUPT, f"{entry.path!r} has {entry.nbytes} bytes for {format_box(entry.box)}")
    ranges = tuple(
        (start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(want.box, entry.box, strict=True)
    )
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Found(slot, index, want, box_bytes, array.itemsize, ranges, strides)


def span(ranges: Ranges, strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the first element of a cut, and how many there are from it to the last one."""
    first = sum(start * stride for (start, _), stride in zip(ranges, strides, strict=True))
    last = sum((stop - 1) * stride for (_, stop), stride in zip(ranges, strides, strict=True))
    return first, last - first + 1


def slabs(ranges: Ranges, strides: tuple[int, ...], max_elements: int) -> Iterator[Ranges]:
    """Split a cut, in C order, into parts that each span at most `max_elements` of the shard."""
    longest = next((dim for dim, (start, stop) in enumerate(ranges) if stop - start > 1), None)
    if longest is None or span(ranges, strides)[1] <= max_elements:
        yield ranges
        return
    start, stop = ranges[longest]
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        yield from slabs((*ranges[:longest], half, *ranges[longest + 1 :]), strides, max_elements)


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
