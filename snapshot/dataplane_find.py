"""Finding what a peer asks for in an arena's slots, and cutting pieces out of shards.

Whole shards are sent as they are, under the checksum of their capture. A piece of a shard has no checksum of
its own: the shard is verified first, then the piece is hashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from reshard.boxes import format_box, shape_of, volume
from reshard.execute import element_dtype
from snapshot.dataplane_slots import OpenSlot, read_range
from snapshot.dataplane_wire import Covers, ReadRequest, Status, WantedRange
from snapshot.manifest import Manifest

BLOCK_BYTES = 1 << 20

Ranges = tuple[tuple[int, int], ...]


class Refusal(Exception):
    """A want that cannot be served: the status and text of its head."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


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
