"""Finishing a persisted snapshot: all of it is there and durable, and only then does it get its name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from reshard.errors import CorruptCopyError, MissingShardError
from snapshot.persist import publish, sync_directory
from snapshot.persist_errors import writing
from snapshot.persist_format import FACTS_NAME, ITEM_NAME, PersistFacts, StoredArray, encode_facts
from snapshot.persist_list import Persisted
from snapshot.persist_orbax import orbax_files
from snapshot.persist_store import chunk_files, stored_arrays, write_array_metadata

_LOCK_SUFFIX = ".__lock"  # what TensorStore writes a chunk to before it gets its name


def finish(
    root: Path, staging: Path, facts: PersistFacts, *, restored_steps: Mapping[int, int] | None = None
) -> Persisted:
    """Make a staging directory, into which all shards were written, the snapshot `<root>/<step>`.

    Checks that each chunk of each array is there in full, writes the metadata, makes all durable and then
    renames. When there is one of this step already, it is kept, unless it is damaged or the job has left its
    generation (`restored_steps`, as for `reshard.lineage`); what is returned says which it is. Raises
    MissingShardError or CorruptCopyError naming array and box, UsageError, PersistentTierError.
    """
    stored = stored_arrays(facts.layout, facts.tree)
    with writing(staging):
        staging.stat()
        _check_chunks(staging, facts, stored.values())
        write_array_metadata(staging, stored.values())
        started_ns = int(staging.stat().st_ctime_ns)
        forms = {path: form for path, (_, form) in stored.items()}
        files = orbax_files(facts.tree, forms, started_ns=started_ns, ended_ns=time.time_ns())
        for name, content in files.items():
            _write(staging / name, content)
        _write(staging / ITEM_NAME / FACTS_NAME, encode_facts(facts))
        _settle(staging)
        return publish(root, staging, facts.step, restored_steps or {})


def _check_chunks(staging: Path, facts: PersistFacts, stored: Iterable[tuple[str, StoredArray]]) -> None:
    for name, form in stored:
        directory = f"{staging / ITEM_NAME / name}/"
        for file, box in chunk_files(form.array, form):
            try:
                nbytes = os.stat(directory + file).st_size
            except FileNotFoundError:
                raise MissingShardError(form.array.path, box, facts.step) from None
            if nbytes != form.chunk_file_bytes:
                raise CorruptCopyError(
                    f"chunk {box} of {form.array.path!r} has {nbytes} bytes, not {form.chunk_file_bytes}",
                    remedy="Write that shard again.",
                    path=form.array.path,
                    box=box,
                )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _settle(staging: Path) -> None:
    """Remove what writers that were killed left behind, and make every directory durable."""
    for directory, _, names in os.walk(staging, topdown=False):
        for name in names:
            if name.endswith(_LOCK_SUFFIX):
                os.unlink(f"{directory}/{name}")
        sync_directory(Path(directory))
