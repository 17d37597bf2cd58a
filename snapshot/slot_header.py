r"""The header page of a slot file, version 1; the bytes are described in `docs/snapshot-format.md`.

    0   8s  magic                      "ELASLOT\0"
    8   u32 format version             1
    12  u32 header bytes               4096
    16  u64 commit word                0 while written; equal to the sequence when complete
    24  u64 header checksum            of page[0:16], page[32:4096] and the checksum table
    32  u64 sequence                   grows by one at each write of this file
    40  u64 step, generation, position, static offset, static bytes, static checksum,
            table offset, shard count, data offset, data bytes

Everything is little-endian. The static manifest is covered through its own checksum, so that a
capture does not hash it again at every step.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import astuple, dataclass

from reshard.errors import CorruptCopyError
from snapshot.checksum import CHECKSUM_BYTES, ByteBuffer, checksum_parts
from snapshot.shm import PAGE_BYTES, align

MAGIC = b"ELASLOT\0"
FORMAT_VERSION = 1
HEADER_BYTES = PAGE_BYTES
SHARD_ALIGNMENT = 64

COMMIT_OFFSET = 16
CHECKSUM_OFFSET = 24
FIELDS_OFFSET = 32

_PREFIX = struct.Struct("<8sII")
_FIELDS = struct.Struct("<11Q")
_WORD = struct.Struct("<Q")
PREFIX = _PREFIX.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES)

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("snapshot slots are little-endian and mapped as they are; this machine is big-endian")


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot says about its content; offsets are from the start of the file."""

    sequence: int
    step: int
    generation: int
    position: int
    static_offset: int
    static_bytes: int
    static_checksum: int
    table_offset: int
    num_shards: int
    data_offset: int
    data_bytes: int

    @property
    def table_bytes(self) -> int:
        """Bytes of the checksum table."""
        return self.num_shards * CHECKSUM_BYTES

    @property
    def end_offset(self) -> int:
        """Where the last shard ends: the bytes of the file that are in use."""
        return self.data_offset + self.data_bytes


def lay_out(static_bytes: int, num_shards: int) -> tuple[int, int, int]:
    """Return the offsets of static manifest, checksum table and shard data."""
    table_offset = align(HEADER_BYTES + static_bytes, CHECKSUM_BYTES)
    return HEADER_BYTES, table_offset, align(table_offset + num_shards * CHECKSUM_BYTES, SHARD_ALIGNMENT)


def slot_bytes(static_bytes: int, num_shards: int, data_bytes: int) -> int:
    """Return the size of the file that holds such a snapshot."""
    return align(lay_out(static_bytes, num_shards)[2] + data_bytes, PAGE_BYTES)


def pack_fields(header: SlotHeader) -> bytes:
    """Return the page from `FIELDS_OFFSET` on: the fields, then zeros."""
    return _FIELDS.pack(*astuple(header)).ljust(HEADER_BYTES - FIELDS_OFFSET, b"\0")


def header_checksum(prefix: ByteBuffer, covered: ByteBuffer, table: ByteBuffer) -> int:
    """Return the checksum of page[0:16], page[32:4096] and the checksum table."""
    return checksum_parts(prefix, covered, table)


def commit_word(page: bytes) -> int:
    """Return the commit word of a page, 0 when the slot is empty or being written."""
    word: int = _WORD.unpack_from(page, COMMIT_OFFSET)[0]
    return word


def check_prefix(page: bytes) -> None:
    """Raise CorruptCopyError with the reason when the page is not the header of a slot we can read."""
    if len(page) < HEADER_BYTES:
        raise CorruptCopyError(f"truncated: {len(page)} bytes, a slot has at least {HEADER_BYTES}")
    magic, version, header_bytes = _PREFIX.unpack_from(page)
    if magic != MAGIC:
        raise CorruptCopyError(f"foreign file: it starts with {magic!r}, a slot with {MAGIC!r}")
    if version > FORMAT_VERSION:
        raise CorruptCopyError(f"future version: format {version}, this program reads up to {FORMAT_VERSION}")
    if version < 1 or header_bytes != HEADER_BYTES:
        raise CorruptCopyError(f"bad header: format {version} with {header_bytes} header bytes")


def unpack_header(page: bytes, file_bytes: int) -> SlotHeader:
    """Return the fields of a complete page; CorruptCopyError when they cannot be true of this file."""
    header = SlotHeader(*_FIELDS.unpack_from(page, FIELDS_OFFSET))
    if commit_word(page) != header.sequence:
        raise CorruptCopyError(f"bad header: commit word {commit_word(page)}, sequence {header.sequence}")
    table_end = header.table_offset + header.table_bytes
    ordered = (
        header.static_offset >= HEADER_BYTES
        and header.static_offset + header.static_bytes <= header.table_offset
        and table_end <= header.data_offset
    )
    if not ordered:
        raise CorruptCopyError("bad header: its parts overlap")
    if header.end_offset > file_bytes:
        raise CorruptCopyError(f"truncated: {file_bytes} bytes, the header says {header.end_offset}")
    return header


def check_header(page: bytes, table: bytes) -> None:
    """Raise CorruptCopyError unless the stored checksum is that of the page and the table."""
    (stored,) = _WORD.unpack_from(page, CHECKSUM_OFFSET)
    page_view = memoryview(page)
    actual = header_checksum(page_view[:COMMIT_OFFSET], page_view[FIELDS_OFFSET:HEADER_BYTES], table)
    if stored != actual:
        raise CorruptCopyError(f"bad header checksum: stored {stored:016x}, computed {actual:016x}")
