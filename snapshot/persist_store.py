"""The zarr arrays of a persisted snapshot, through TensorStore: one host's shards, then metadata."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

from reshard.boxes import Box
from reshard.layout import ArrayLayout, Layout
from snapshot.persist_errors import writing
from snapshot.persist_format import ITEM_NAME, StoredArray, stored_array
from snapshot.persist_tree import TreeDescription, check_description
from snapshot.source import ShardSource

MAX_BYTES_IN_FLIGHT = 256 << 20
"""What one host reads or writes at a time: enough to keep a disk busy, little beside a state."""

_CONTEXT = {"data_copy_concurrency": {"limit": 2}, "file_io_concurrency": {"limit": 8}, "cache_pool": {}}


def stored_arrays(layout: Layout, tree: TreeDescription) -> dict[str, tuple[str, StoredArray]]:
    """Return for each array's path its directory's name and how it is stored.

    Raises UsageError before anything is written when the tree cannot be stored.
    """
    names = check_description(tree, [array.path for array in layout.arrays])
    return {array.path: (names[array.path], stored_array(layout, array)) for array in layout.arrays}


def write_shards(
    staging: Path,
    layout: Layout,
    tree: TreeDescription,
    shards: Iterable[tuple[str, Box]],
    source: ShardSource,
    *,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Write these shards into their chunks below `staging`; return the bytes of their elements.

    May be repeated: the same shard gives the same files. `on_progress` gets the bytes that have become
    durable so far. Raises UsageError for a state that cannot be stored, MissingShardError when `source` has a
    shard nowhere intact, PersistentTierError when the file system refuses.
    """
    stored = stored_arrays(layout, tree)
    context = ts.Context(_CONTEXT)
    pending: deque[tuple[Any, int]] = deque()
    in_flight = written = 0
    with writing(staging):
        staging.stat()
        for path, box in sorted(shards):
            name, form = stored[path]
            form.check_aligned(box)
            store = _open(staging / ITEM_NAME / name, form, context, assume_metadata=True)
            elements = source.read(path, box)
            if not elements.size:
                continue
            data = form.to_stored(elements, store.dtype.numpy_dtype)
            future = store[form.stored_slices(box)].write(data, can_reference_source_data_indefinitely=True)
            pending.append((future, elements.nbytes))
            in_flight += elements.nbytes
            while in_flight > MAX_BYTES_IN_FLIGHT:
                in_flight, written = _wait_oldest(pending, in_flight, written, on_progress)
        while pending:
            in_flight, written = _wait_oldest(pending, in_flight, written, on_progress)
    return written


def write_array_metadata(staging: Path, stored: Iterable[tuple[str, StoredArray]]) -> None:
    """Write `zarr.json` of every array: from then on what lies there can be read."""
    context = ts.Context(_CONTEXT)
    futures = []
    for name, form in stored:
        spec = _spec(staging / ITEM_NAME / name, form)
        futures.append(ts.open(spec, create=True, open=True, context=context))
    for future in futures:
        future.result()


def open_array(directory: Path, form_shape: tuple[int, ...], dtype: str) -> Any:
    """Open an array for reading; a chunk that is missing is an error then, not zeros."""
    return ts.open(
        {
            "driver": "zarr3",
            "kvstore": _kvstore(directory),
            "fill_missing_data_reads": False,
            "metadata": {"shape": list(form_shape), "data_type": dtype},
        },
        open=True,
        read=True,
    )


def _wait_oldest(
    pending: deque[tuple[Any, int]], in_flight: int, written: int, on_progress: Callable[[int], None]
) -> tuple[int, int]:
    future, nbytes = pending.popleft()
    future.result()
    on_progress(written + nbytes)
    return in_flight - nbytes, written + nbytes


def _open(directory: Path, form: StoredArray, context: Any, *, assume_metadata: bool) -> Any:
    spec = {**_spec(directory, form), "open": True, "assume_metadata": assume_metadata}
    return ts.open(spec, context=context).result()


def _spec(directory: Path, form: StoredArray) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": _kvstore(directory),
        "metadata": form.zarr_metadata(),
        "store_data_equal_to_fill_value": True,  # or chunks of zeros would not exist, as if never written
    }


def _kvstore(directory: Path) -> dict[str, Any]:
    return {"driver": "file", "path": f"{directory}/"}


def chunk_files(array: ArrayLayout, form: StoredArray) -> Iterator[tuple[str, Box]]:
    """Yield the chunk files an array must have, and the elements in each; none for an empty array."""
    return form.chunks() if array.nbytes else iter(())
