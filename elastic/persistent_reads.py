"""What hosts read back from the persistent tier: their boxes for a restore, the digest of a whole state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from elastic.events import ComputeDigest, SnapshotSummary, StagePersisted
from reshard.boxes import full_box
from reshard.layout import ArrayLayout
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.digest import state_digest
from snapshot.persist_list import Persisted, list_persisted

FlatArray = tuple[str, str, tuple[int, ...], Any]


def summarise(found: Persisted) -> SnapshotSummary:
    """What the coordinator must know of a persisted snapshot."""
    return SnapshotSummary(
        step=found.step,
        generation=found.generation,
        layout=found.layout,
        holdings=(),
        position=found.position,
    )


def find_persisted(root: Path) -> tuple[SnapshotSummary, ...]:
    """The complete snapshots below `root`, the newest first."""
    return tuple(map(summarise, list_persisted(root)))


def stage_from_disk(arena: Arena, root: Path, command: StagePersisted) -> int:
    """Read this host's boxes into its stage, verified; returns their bytes. Raises ElasticError, OSError."""
    from snapshot.persist_source import PersistentSource  # loads TensorStore

    source = PersistentSource(root / str(command.step))
    with arena.stage_writer(command.layout, command.boxes) as stage:
        source.read_into(
            (path, box, view) for (path, box), view in zip(command.boxes, stage.shard_views, strict=True)
        )
        staged_bytes = sum(view.nbytes for view in stage.shard_views)
        stage.commit(
            step=command.step,
            generation=command.generation,
            position=command.position,
            checksums=[checksum(view) for view in stage.shard_views],
        )
    return staged_bytes


def digest_from_disk(root: Path, command: ComputeDigest) -> str:
    """The digest of a whole persisted state, an array at a time. Raises ElasticError, OSError."""
    from snapshot.persist_source import PersistentSource

    source = PersistentSource(root / str(command.step))

    def arrays() -> Iterator[FlatArray]:
        for array in command.layout.arrays:
            elements = source.read(array.path, full_box(array.shape))
            yield array.path, array.dtype, array.shape, _as_bytes(array, elements)

    return state_digest(arrays())


def _as_bytes(array: ArrayLayout, elements: Any) -> Any:
    return cast("Any", elements).reshape(-1).view(np.uint8) if array.nbytes else b""
