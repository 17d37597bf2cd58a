"""Keeping a snapshot that the worker would soon overwrite: a copy of its slot, as a file of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from reshard.errors import CorruptCopyError
from snapshot.contents import complete_slots
from snapshot.manifest import Manifest, encode_static
from snapshot.slot import SlotWriter, allocate_slot, required_bytes
from snapshot.slot_reader import SlotReader

PINNED_NAME = "pinned"


def pin_snapshot(slots: Iterable[Path], target: Path, step: int, generation: int) -> Path | None:
    """Copy the snapshot of `step`, captured in `generation`, into the slot file `target`; None without one.

    Each shard is checked against its checksum. Also None when the worker overwrote the slot meanwhile. Raises
    CorruptCopyError naming the array when its bytes are damaged, InsufficientMemoryError when
    there is no room; what was pinned before is then still there.
    """
    for reader, manifest in complete_slots(slots, []):
        with reader:
            if (manifest.step, manifest.generation) != (step, generation):
                continue
            try:
                _copy(reader, manifest, target)
            except CorruptCopyError:
                if _holds(reader, manifest):
                    raise
                continue
            return target
    return None


def _copy(reader: SlotReader, manifest: Manifest, target: Path) -> None:
    temporary = target.with_name(target.name + ".part")
    try:
        allocate_slot(temporary, required_bytes(manifest.static))
        writer = SlotWriter(temporary)
        try:
            writer.prepare(manifest.static, encode_static(manifest.static))
            for index, view in enumerate(writer.shard_views):
                np.copyto(np.frombuffer(view, np.uint8), reader.read_shard(index))
            writer.commit(
                step=manifest.step,
                generation=manifest.generation,
                position=manifest.position,
                checksums=manifest.checksums,
            )
        finally:
            writer.close()
        os.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _holds(reader: SlotReader, manifest: Manifest) -> bool:
    try:
        return reader.read_manifest() == manifest
    except CorruptCopyError:
        return True  # damaged, not overwritten
