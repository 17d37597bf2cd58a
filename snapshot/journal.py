r"""The journal: which samples each step uses, written before the step is dispatched.

A file that is a ring of fixed-size records, so that the newest `num_records` steps can be replayed by
whoever still has the file. The worker appends; the agent reads at any moment and skips what is torn.

    header page   8s magic "ELAJRNL\0" | u32 version | u32 header bytes | u64 record bytes | u64 records
                  | u64 checksum
    record        u64 commit | u64 checksum | u64 sequence, step, generation, position
                  | u32 ids | u32 state bytes | u64 ids[] | state
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.errors import CorruptCopyError, InsufficientMemoryError, UsageError
from snapshot.checksum import checksum
from snapshot.shm import PAGE_BYTES, align, allocate_file, map_writable, open_regular

MAGIC = b"ELAJRNL\0"
FORMAT_VERSION = 1
RECORD_HEADER_BYTES = 56

_HEADER = struct.Struct("<8sIIQQ")
_WORD = struct.Struct("<Q")
_BODY = struct.Struct("<QQQQII")
_BODY_OFFSET = 16
_MAX_RECORDS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """What one step consumes: enough to run it again with the same samples.

    `position` is the place in the sample stream after the step; `iterator_state` is opaque.
    """

    step: int
    generation: int
    position: int
    sample_ids: Sequence[int]
    iterator_state: bytes = b""


def record_bytes(num_sample_ids: int, iterator_state_bytes: int = 0) -> int:
    """Return the record size that holds so many sample ids and so much iterator state."""
    return align(RECORD_HEADER_BYTES + 8 * num_sample_ids + iterator_state_bytes, 64)


def allocate_journal(path: Path, *, record_bytes: int, num_records: int) -> None:
    """Make an empty journal. Raises UsageError for a size that cannot be, InsufficientMemoryError."""
    record_bytes = align(record_bytes, 64)
    if record_bytes < RECORD_HEADER_BYTES or not 1 <= num_records <= _MAX_RECORDS:
        raise UsageError(f"a journal of {num_records} records of {record_bytes} bytes cannot be")
    head = _HEADER.pack(MAGIC, FORMAT_VERSION, PAGE_BYTES, record_bytes, num_records)
    allocate_file(path, PAGE_BYTES + record_bytes * num_records, head + _WORD.pack(checksum(head)))


class Journal:
    """Appends to a journal file through a mapping; one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = JournalReader(path)
        self.record_bytes, self.num_records = reader.record_bytes, reader.num_records
        self._next_sequence = 1 + max((sequence for sequence, _ in reader.committed()), default=0)
        reader.close()
        self._map, _ = map_writable(path)
        self._view = memoryview(self._map)
        self._words = self._view.cast("Q")

    def append(self, record: JournalRecord) -> None:
        """Write a record over the oldest one; it is readable when this returns.

        Raises UsageError when it does not fit.
        """
        ids = array("Q", record.sample_ids)
        state = record.iterator_state
        sequence = self._next_sequence
        body = b"".join(
            (
                _BODY.pack(sequence, record.step, record.generation, record.position, len(ids), len(state)),
                ids.tobytes(),
                state,
            )
        )
        if _BODY_OFFSET + len(body) > self.record_bytes:
            raise UsageError(
                f"journal record of step {record.step} needs {_BODY_OFFSET + len(body)} bytes, "
                f"{self.path} has {self.record_bytes} a record",
                remedy="Reserve the journal for the largest batch and iterator state.",
            )
        start = PAGE_BYTES + (sequence % self.num_records) * self.record_bytes
        commit = start // 8
        self._words[commit] = 0
        self._view[start + _BODY_OFFSET : start + _BODY_OFFSET + len(body)] = body
        self._words[commit + 1] = checksum(body)
        self._words[commit] = sequence
        self._next_sequence = sequence + 1

    def close(self) -> None:
        """Unmap the journal; harmless when already closed."""
        if not self._map.closed:
            self._words.release()
            self._view.release()
            with contextlib.suppress(BufferError):
                self._map.close()


class JournalReader:
    """Reads a journal that another process may be writing.

    Raises CorruptCopyError, saying why, when the file is not a journal; records that are torn,
    overwritten while read or damaged are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd: int | None = open_regular(path, os.O_RDONLY)
        except ValueError as error:
            raise CorruptCopyError(f"{path}: foreign file: {error}", path=str(path)) from error
        try:
            self.record_bytes, self.num_records = self._read_header()
            self._next_index = 0
        except CorruptCopyError:
            self.close()
            raise

    def records(self) -> tuple[JournalRecord, ...]:
        """Return the complete records, oldest first; a step that ran again appears again."""
        return tuple(record for _, record in self.committed())

    def since(self, step: int) -> tuple[JournalRecord, ...]:
        """Return the newest record of each step after `step`, in step order."""
        newest = {record.step: record for record in self.records() if record.step > step}
        return tuple(newest[key] for key in sorted(newest))

    def find(self, step: int, generation: int) -> JournalRecord | None:
        """Return the newest complete record of a step in a generation; of the others only heads are read."""
        if self._fd is None:
            raise UsageError(f"{self.path}: reader is closed")
        # Mostly it is the one after that which was asked for last: a long journal is not searched for each
        # step. Records of a step in one generation are alike.
        if (parsed := self._read(self._next_index, step, generation)) is not None:
            self._next_index = (self._next_index + 1) % self.num_records
            return parsed[1]
        newest: tuple[int, JournalRecord] | None = None
        for index in range(self.num_records):
            parsed = self._read(index, step, generation)
            if parsed is not None and (newest is None or parsed[0] > newest[0]):
                newest = parsed
                self._next_index = (index + 1) % self.num_records
        return None if newest is None else newest[1]

    def _read(self, index: int, step: int, generation: int) -> tuple[int, JournalRecord] | None:
        """The record at a place in the ring with its sequence, if it is a complete one of this step."""
        assert self._fd is not None
        offset = PAGE_BYTES + index * self.record_bytes
        head = os.pread(self._fd, RECORD_HEADER_BYTES, offset)
        if len(head) < RECORD_HEADER_BYTES:
            return None
        if _BODY.unpack_from(head, _BODY_OFFSET)[1:3] != (step, generation):
            return None
        return _parse(memoryview(os.pread(self._fd, self.record_bytes, offset)))

    def committed(self) -> list[tuple[int, JournalRecord]]:
        """Return (sequence, record) of the complete records, in sequence order."""
        if self._fd is None:
            raise UsageError(f"{self.path}: reader is closed")
        found: list[tuple[int, JournalRecord]] = []
        data = os.pread(self._fd, self.record_bytes * self.num_records, PAGE_BYTES)
        for start in range(0, len(data) - self.record_bytes + 1, self.record_bytes):
            parsed = _parse(memoryview(data)[start : start + self.record_bytes])
            if parsed is not None:
                found.append(parsed)
        return sorted(found, key=lambda item: item[0])

    def close(self) -> None:
        """Close the file; harmless when already closed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _read_header(self) -> tuple[int, int]:
        assert self._fd is not None
        page = os.pread(self._fd, _HEADER.size + _WORD.size, 0)
        if len(page) < _HEADER.size + _WORD.size:
            raise CorruptCopyError(f"{self.path}: truncated: {len(page)} bytes")
        magic, version, header_bytes, size, count = _HEADER.unpack_from(page)
        if magic != MAGIC:
            raise CorruptCopyError(
                f"{self.path}: foreign file: it starts with {magic!r}, a journal with {MAGIC!r}"
            )
        if version > FORMAT_VERSION:
            raise CorruptCopyError(
                f"{self.path}: future version: format {version}, known up to {FORMAT_VERSION}"
            )
        if (
            _WORD.unpack_from(page, _HEADER.size)[0] != checksum(page[: _HEADER.size])
            or header_bytes != PAGE_BYTES
        ):
            raise CorruptCopyError(f"{self.path}: bad header checksum")
        file_bytes = os.fstat(self._fd).st_size
        if size < RECORD_HEADER_BYTES or PAGE_BYTES + size * count > file_bytes:
            raise CorruptCopyError(
                f"{self.path}: truncated: {file_bytes} bytes, the header says {size} x {count}"
            )
        return size, count


def _parse(data: memoryview) -> tuple[int, JournalRecord] | None:
    (commit,) = _WORD.unpack_from(data, 0)
    if commit == 0:
        return None
    sequence, step, generation, position, num_ids, state_bytes = _BODY.unpack_from(data, _BODY_OFFSET)
    ids_start = _BODY_OFFSET + _BODY.size
    end = ids_start + 8 * num_ids + state_bytes
    if commit != sequence or end > len(data):
        return None
    if _WORD.unpack_from(data, 8)[0] != checksum(data[_BODY_OFFSET:end]):
        return None
    ids = np.frombuffer(data, dtype="<u8", count=num_ids, offset=ids_start)
    state = bytes(data[end - state_bytes : end])
    record = JournalRecord(
        step=step,
        generation=generation,
        position=position,
        sample_ids=tuple(ids.tolist()),
        iterator_state=state,
    )
    return sequence, record


def copy_journal(path: Path, *, record_bytes: int, num_records: int) -> None:
    """Replace a journal by one of another size, keeping its newest records.

    Raises InsufficientMemoryError or UsageError, leaving the old one as it was.
    """
    reader = JournalReader(path)
    kept = reader.records()[-num_records:]
    reader.close()
    temporary = path.with_name(path.name + ".part")
    try:
        allocate_journal(temporary, record_bytes=record_bytes, num_records=num_records)
        journal = Journal(temporary)
        for record in kept:
            journal.append(record)
        journal.close()
    except (InsufficientMemoryError, UsageError):
        temporary.unlink(missing_ok=True)
        raise
    os.rename(temporary, path)
