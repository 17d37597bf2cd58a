"""How a state lies on disk in the persistent tier: arrays, chunks, and the facts beside them.

See docs/persistent-format.md. Pure: no TensorStore, no Orbax, no files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from reshard.boxes import Box, shape_of
from reshard.errors import CorruptCopyError, UsageError
from reshard.layout import ArrayLayout, Layout
from snapshot.checksum import checksum
from snapshot.persist_tree import TreeDescription

FORMAT_VERSION = 1
ITEM_NAME = "default"
FACTS_NAME = "elastic.json"
MAX_CHUNK_BYTES = 64 << 20

_CRC_BYTES = 4
_MAX_EXTRA_PARTS = 4  # of a sharded dim: how many times more parts than asked, to find ones that divide it
_INTEGERS = ("int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn")
_FLOAT8 = ("e3m4", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_DIRECT = frozenset({"bool", *_INTEGERS, *_FLOATS, *(f"float8_{kind}" for kind in _FLOAT8)})
_AS_UINT8 = frozenset({"uint1", "uint2", "uint4"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFacts:
    """What we know of a persisted snapshot beside its arrays; `extra` is the caller's own, as JSON values.

    `epoch` is the place of its job among those that wrote to the same root: a later job begins to count
    generations anew, and goes on from what an earlier one left.
    """

    step: int
    generation: int
    position: int
    layout: Layout
    tree: TreeDescription
    job_id: str = ""
    epoch: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The zarr array of one array of the state.

    TensorStore lacks some dtypes. Unsigned ones below a byte are stored as uint8, with the same values;
    any other as its raw bytes in one more dim (`is_raw`), so that nobody takes them for values.
    """

    array: ArrayLayout
    dtype: str
    is_raw: bool
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def chunk_file_bytes(self) -> int:
        """Bytes of each chunk's file: elements (chunks at an edge are padded) and a CRC32C."""
        itemsize = 1 if self.is_raw else self.array.itemsize
        return math.prod(self.chunk_shape) * itemsize + _CRC_BYTES

    def chunks(self) -> Iterator[tuple[str, Box]]:
        """Yield the file of each chunk, relative to the array's directory, and the elements in it."""
        parts = [
            [(start, min(start + length, size)) for start in range(0, size, length)]
            for size, length in zip(self.shape, self.chunk_shape, strict=True)
        ]
        for places in itertools.product(*(range(len(ranges)) for ranges in parts)):
            box = tuple(ranges[place] for ranges, place in zip(parts, places, strict=True))
            yield "/".join(["c", *map(str, places)]), box[: len(self.array.shape)]

    def check_aligned(self, box: Box) -> None:
        """Raise UsageError unless the box is made of whole chunks: else two hosts could write one chunk."""
        for (start, stop), size, length in zip(box, self.array.shape, self.chunk_shape, strict=False):
            if start % length or (stop % length and stop != size):
                raise UsageError(
                    f"box {box} of {self.array.path!r} is not made of whole chunks of {self.chunk_shape}",
                    remedy="Write the boxes of the layout.",
                )

    def to_stored(self, elements: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Give opaque elements of a box the form they are stored in; `dtype` is numpy's of `self.dtype`."""
        if not self.is_raw:
            return elements.view(dtype)
        return elements.reshape(-1).view(np.uint8).reshape(*elements.shape, self.array.itemsize)

    def stored_slices(self, box: Box) -> tuple[slice, ...]:
        """Return the slices of the zarr array that hold `box`."""
        return tuple(slice(start, stop) for start, stop in (*box, *self._raw_dim()))

    def stored_shape(self, box: Box) -> tuple[int, ...]:
        """Return the shape that `box` has in the zarr array."""
        return shape_of((*box, *self._raw_dim()))

    def zarr_metadata(self) -> dict[str, Any]:
        """Return what must be in the array's `zarr.json`."""
        endian = {"configuration": {"endian": "little"}}
        return {
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk_shape)}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "bytes", **endian}, {"name": "crc32c"}],
        }

    def _raw_dim(self) -> Box:
        return ((0, self.array.itemsize),) if self.is_raw else ()


def stored_array(layout: Layout, array: ArrayLayout) -> StoredArray:
    """Return how an array is stored: chunks never cross the boxes of the layout, nor 64 MiB if it can be."""
    is_raw = array.dtype not in _DIRECT | _AS_UINT8
    dtype = array.dtype if array.dtype in _DIRECT else "uint8"
    box_shape = shape_of(layout.boxes(array)[0])
    chunk = chunk_shape(array.shape, box_shape, array.itemsize)
    raw_dim = (array.itemsize,) if is_raw else ()
    return StoredArray(array, dtype, is_raw, array.shape + raw_dim, chunk + raw_dim)


def chunk_shape(
    shape: tuple[int, ...], box_shape: tuple[int, ...], itemsize: int, max_bytes: int = MAX_CHUNK_BYTES
) -> tuple[int, ...]:
    """Cut boxes into chunks of about `max_bytes` at most, early dims first.

    Of a dim that is sharded, a chunk's length divides the box's, and if no number of parts near the one
    wanted does, the dim is left whole. Lengths are at least 1, also where the array is empty.
    """
    chunk = [max(length, 1) for length in box_shape]
    for dim, length in enumerate(chunk):
        wanted = min(-(-math.prod(chunk) * itemsize // max_bytes), length)
        if wanted > 1 and length == shape[dim]:
            chunk[dim] = -(-length // wanted)
        elif wanted > 1:
            options = range(wanted, min(length, wanted * _MAX_EXTRA_PARTS) + 1)
            chunk[dim] = length // next((parts for parts in options if length % parts == 0), 1)
    return tuple(chunk)


class _Sealed(msgspec.Struct, frozen=True):
    checksum: str
    facts: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    format_version: int


def encode_facts(facts: PersistFacts) -> bytes:
    """Write the facts as a JSON object, with a checksum of them. Raises UsageError for a bad `extra`."""
    try:
        body = msgspec.json.encode(facts)
    except (TypeError, ValueError) as error:
        raise UsageError(f"facts that are not JSON: {error}") from error
    return msgspec.json.encode(_Sealed(f"{checksum(body):016x}", msgspec.Raw(body)))


def decode_facts(data: bytes) -> PersistFacts:
    """Read what `encode_facts` wrote. Raises CorruptCopyError, saying why, for anything else."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if sealed.checksum != f"{checksum(bytes(sealed.facts)):016x}":
            raise CorruptCopyError("bad checksum of the facts")
        version = msgspec.json.decode(sealed.facts, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise CorruptCopyError(
                f"format version {version}, this release reads {FORMAT_VERSION}",
                remedy="Use the release that wrote it, or plain Orbax.",
            )
        return msgspec.json.decode(sealed.facts, type=PersistFacts)
    except (msgspec.MsgspecError, UsageError, RecursionError) as error:
        raise CorruptCopyError(f"bad facts: {error}") from error
