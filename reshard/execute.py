"""Carries out transfers on host memory: fills the boxes of one target host from the shards of the sources.

Works on bytes: elements are opaque values of `itemsize` bytes, so every dtype JAX has passes through
unchanged, and nothing here needs to know bfloat16 or float8. Pure of I/O: the caller's `fetch` reads, and
checks what it read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.boxes import relative_slices, shape_of, volume
from reshard.errors import CorruptCopyError, InvariantBrokenError, UsageError, format_box
from reshard.holdings import Shard
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.transfer import Transfer
from reshard.write_counts import WriteCounts

Buffer = NDArray[Any]
Fetch = Callable[[Transfer], "Buffer | memoryview"]
"""Returns the bytes of a transfer, C order: either just the piece, or the whole source box it is cut from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What one target host has after its part of a plan.

    `buffers` holds, for each (path, box) of the host, an array of the box's shape whose elements are
    opaque (`element_dtype`); view it with the real dtype. One that came in one piece is the very memory that
    was fetched. `bytes_received` came from other hosts; of what the host held itself, `bytes_reused` needed
    no copy and `bytes_copied` did. `num_writes` counts the writes to each element, and is empty unless
    `count_writes` was asked for.
    """

    buffers: dict[Shard, Buffer]
    num_writes: dict[Shard, NDArray[np.uint8]]
    bytes_received: int
    bytes_copied: int
    bytes_reused: int


def element_dtype(itemsize: int) -> np.dtype[Any]:
    """Return a dtype of `itemsize` bytes that copies elements bit for bit."""
    return np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else np.dtype(f"V{itemsize}")


def execute_transfers(
    transfers: Iterable[Transfer],
    layout: Layout,
    host: HostId,
    fetch: Fetch,
    *,
    paths: Collection[str] | None = None,
    out: Mapping[Shard, Buffer] | None = None,
    count_writes: bool = False,
) -> Execution:
    """Fill every box that `host` has in `layout` by these transfers, and prove that none is short.

    With `paths` only the boxes of these arrays, one round of a plan (`Plan.rounds`); transfers of others are
    passed over. A fetched piece that is the whole target box is taken as it is, so `fetch` must give it away,
    or let nobody write to it while it is in use. `out` may give a C-contiguous, writable buffer for any
    (path, box), of the box's size in bytes, to be filled in place (a stage in shared memory). Empty boxes get
    empty buffers.

    Raises `CorruptCopyError` when `fetch` returns another number of bytes than the piece or its source box
    has, `UsageError` when a buffer in `out` or a transfer does not fit the layout, and `InvariantBrokenError`
    when an element would be left unwritten or, with `count_writes`, is not written exactly once.
    """
    targets = _Targets(layout, host, paths, out or {}, count_writes=count_writes)
    for transfer in transfers:
        if paths is None or transfer.path in paths:
            targets.check(transfer)
            targets.write(transfer, fetch(transfer))
    return targets.finish()


class _Targets:
    """The boxes of one host, being filled; memory is taken for a box when its first piece comes."""

    def __init__(
        self,
        layout: Layout,
        host: HostId,
        paths: Collection[str] | None,
        out: Mapping[Shard, Buffer],
        *,
        count_writes: bool,
    ) -> None:
        self._host = host
        self._itemsizes: dict[Shard, int] = {
            (array.path, box): array.itemsize
            for array in layout.arrays
            if paths is None or array.path in paths
            for box in layout.boxes_by_host(array).get(host, ())
        }
        self._buffers = {
            key: _in_place(key, out[key], itemsize) for key, itemsize in self._itemsizes.items() if key in out
        }
        self._num_written = dict.fromkeys(self._itemsizes, 0)
        self._counts = {key: WriteCounts(*key) for key in self._itemsizes} if count_writes else {}
        self._received = self._copied = self._reused = 0

    def check(self, transfer: Transfer) -> None:
        """Raise unless the transfer is into a box of this host in which so much is still missing."""
        key = (transfer.path, transfer.target_box)
        if transfer.target != self._host or self._itemsizes.get(key) != transfer.itemsize:
            raise UsageError(f"{transfer}: the layout has no such box on {self._host}", path=transfer.path)
        self._num_written[key] += volume(transfer.piece)
        if self._num_written[key] > volume(transfer.target_box):
            raise self._broken(key)  # before it is written: the box may be memory that others read

    def write(self, transfer: Transfer, data: Buffer | memoryview) -> None:
        """Put what was fetched into its box."""
        key = (transfer.path, transfer.target_box)
        piece = _piece(transfer, data)
        is_whole = transfer.piece == transfer.target_box and data.nbytes == transfer.nbytes
        is_taken = is_whole and key not in self._buffers
        if is_taken:
            self._buffers[key] = piece
        else:
            self._buffer(key)[relative_slices(transfer.piece, transfer.target_box)] = piece
        if not transfer.is_local:
            self._received += transfer.nbytes
        elif is_taken and transfer.is_reuse:
            self._reused += transfer.nbytes
        else:
            self._copied += transfer.nbytes
        if self._counts:
            self._counts[key].add(transfer.piece)

    def finish(self) -> Execution:
        """Return the filled boxes. Raises `InvariantBrokenError` unless each is whole."""
        for key, num_written in self._num_written.items():
            if num_written != volume(key[1]):
                raise self._broken(key)
        for counts in self._counts.values():
            counts.check_once()
        return Execution(
            buffers={key: self._buffer(key) for key in self._itemsizes},
            num_writes={key: counts.counts for key, counts in self._counts.items()},
            bytes_received=self._received,
            bytes_copied=self._copied,
            bytes_reused=self._reused,
        )

    def _buffer(self, key: Shard) -> Buffer:
        if key not in self._buffers:
            self._buffers[key] = np.empty(shape_of(key[1]), element_dtype(self._itemsizes[key]))
        return self._buffers[key]

    def _broken(self, key: Shard) -> InvariantBrokenError:
        path, box = key
        return InvariantBrokenError(
            f"the plan writes {self._num_written[key]} of the {volume(box)} elements of {path!r} "
            f"{format_box(box)}",
            path=path,
            box=box,
        )


def _in_place(key: Shard, given: Buffer, itemsize: int) -> Buffer:
    """Return the caller's buffer for a box as elements of the box's shape."""
    path, box = key
    nbytes = volume(box) * itemsize
    if given.nbytes != nbytes or not (given.flags.c_contiguous and given.flags.writeable):
        raise UsageError(
            f"the buffer for {path!r} {format_box(box)} must be writable, C-contiguous and of {nbytes} bytes",
            path=path,
            box=box,
        )
    return _as_elements(given, element_dtype(itemsize)).reshape(shape_of(box))


def _piece(transfer: Transfer, data: Buffer | memoryview) -> Buffer:
    """Return the transfer's piece out of what `fetch` gave, without copying."""
    # The piece lies inside the source box, so their sizes are equal only when they are the same box.
    dtype = element_dtype(transfer.itemsize)
    if data.nbytes == transfer.nbytes:
        return _as_elements(data, dtype).reshape(shape_of(transfer.piece))
    if data.nbytes == volume(transfer.source_box) * transfer.itemsize:
        shard = _as_elements(data, dtype).reshape(shape_of(transfer.source_box))
        return shard[relative_slices(transfer.piece, transfer.source_box)]
    raise CorruptCopyError(
        f"{transfer}: got {data.nbytes} bytes where the piece has {transfer.nbytes}",
        path=transfer.path,
        box=transfer.source_box,
        source=transfer.source,
    )


def _as_elements(data: Buffer | memoryview, dtype: np.dtype[Any]) -> Buffer:
    """Return the bytes of `data`, in C order, as a flat array of `dtype`."""
    flat = np.ascontiguousarray(data).reshape(-1)
    return flat.view(np.uint8).view(dtype) if flat.size else np.empty(0, dtype)
