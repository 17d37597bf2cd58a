"""Carries out a plan on host memory: fills the boxes of one target host from the shards of the sources.

Works on bytes: elements are opaque values of `itemsize` bytes, so every dtype JAX has passes through
unchanged, and nothing here needs to know bfloat16 or float8. Pure of I/O: the caller's `fetch` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.boxes import Box, relative_slices, shape_of, volume
from reshard.errors import CorruptCopyError, InvariantBrokenError, UsageError, format_box
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.plan import Plan
from reshard.transfer import Transfer

Buffer = NDArray[Any]
Fetch = Callable[[Transfer], "Buffer | memoryview"]
"""Returns the bytes of a transfer, C order: either just the piece, or the whole source box it is cut from."""

ShardKey = tuple[str, Box]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What one target host has after its part of a plan.

    `buffers` holds, for each (path, box) of the host, an array of the box's shape whose elements are
    opaque (`element_dtype`); view it with the real dtype. `num_writes` counts the writes to each element,
    and is empty unless `count_writes` was asked for.
    """

    buffers: dict[ShardKey, Buffer]
    num_writes: dict[ShardKey, NDArray[np.int64]]


def element_dtype(itemsize: int) -> np.dtype[Any]:
    """Return a dtype of `itemsize` bytes that copies elements bit for bit."""
    return np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else np.dtype(f"V{itemsize}")


def execute_plan(
    plan: Plan,
    layout: Layout,
    host: HostId,
    fetch: Fetch,
    *,
    out: Mapping[ShardKey, Buffer] | None = None,
    count_writes: bool = False,
) -> Execution:
    """Fill every box that `host` has in `layout`, as `plan` says, and prove that none is short.

    `out` may give a C-contiguous, writable buffer for any (path, box), of the box's size in bytes, to be
    filled in place (a stage in shared memory); others are allocated. Empty boxes get empty buffers.
    Raises `CorruptCopyError` when `fetch` returns another number of bytes than the piece or its source box
    has, `UsageError` when a buffer in `out` or the plan does not fit the layout, and `InvariantBrokenError`
    when an element would be left unwritten or, with `count_writes`, is not written exactly once.
    """
    buffers = _target_buffers(layout, host, out or {})
    num_writes = (
        {key: np.zeros(buffer.shape, np.int64) for key, buffer in buffers.items()} if count_writes else {}
    )
    num_written = dict.fromkeys(buffers, 0)
    for transfer in plan.for_target(host):
        key = (transfer.path, transfer.target_box)
        if key not in buffers or buffers[key].dtype.itemsize != transfer.itemsize:
            raise UsageError(f"{transfer}: the layout has no such box on {host}", path=transfer.path)
        where = relative_slices(transfer.piece, transfer.target_box)
        buffers[key][where] = _piece(transfer, fetch(transfer))
        num_written[key] += volume(transfer.piece)
        if count_writes:
            num_writes[key][where] += 1
    for key, buffer in buffers.items():
        _check_complete(key, buffer.size, num_written[key], num_writes.get(key))
    return Execution(buffers=buffers, num_writes=num_writes)


def _target_buffers(layout: Layout, host: HostId, out: Mapping[ShardKey, Buffer]) -> dict[ShardKey, Buffer]:
    buffers: dict[ShardKey, Buffer] = {}
    for array in layout.arrays:
        dtype = element_dtype(array.itemsize)
        for box in layout.boxes_by_host(array).get(host, ()):
            given = out.get((array.path, box))
            if given is None:
                buffers[array.path, box] = np.empty(shape_of(box), dtype)
                continue
            if given.nbytes != array.box_nbytes(box) or not (
                given.flags.c_contiguous and given.flags.writeable
            ):
                raise UsageError(
                    f"the buffer for {array.path!r} {format_box(box)} must be writable, C-contiguous and of "
                    f"{array.box_nbytes(box)} bytes",
                    path=array.path,
                    box=box,
                )
            buffers[array.path, box] = _as_elements(given, dtype).reshape(shape_of(box))
    return buffers


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


def _check_complete(key: ShardKey, size: int, num_written: int, counts: NDArray[np.int64] | None) -> None:
    path, box = key
    if num_written != size:
        raise InvariantBrokenError(
            f"the plan writes {num_written} of the {size} elements of {path!r} {format_box(box)}",
            path=path,
            box=box,
        )
    if counts is not None and not (counts == 1).all():
        raise InvariantBrokenError(
            f"the plan writes elements of {path!r} {format_box(box)} {counts.min()} to {counts.max()} times",
            path=path,
            box=box,
        )
