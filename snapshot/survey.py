"""What a job has in host memory on this machine: every slot of every host. Reads only, takes no lock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reshard.boxes import Box
from reshard.coverage import uncovered_at
from reshard.errors import CorruptCopyError
from reshard.ids import HostId
from snapshot.locate import FoundJob, slot_files
from snapshot.manifest import Manifest
from snapshot.mapped_slot import open_slot

SlotState = Literal["complete", "empty", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInfo:
    """One slot file; step and what follows are None unless it is complete, `reason` is set if it is damaged.

    `is_newest_covered` marks the slots of the newest snapshot that the hosts here cover together.
    """

    host: str
    slot: str
    state: SlotState
    file_bytes: int
    reason: str | None = None
    step: int | None = None
    generation: int | None = None
    position: int | None = None
    num_shards: int | None = None
    data_bytes: int | None = None
    is_newest_covered: bool = False


def list_slots(job: FoundJob) -> tuple[SlotInfo, ...]:
    """Return all slots of a job, by host and number; shard bytes are not read."""
    read = [(host, path, _read_slot(host, path)) for host, path in slot_files(job)]
    newest = _newest_covered(found for _, _, found in read if isinstance(found, Manifest))
    return tuple(_slot_info(host, path, found, newest) for host, path, found in read if found != "gone")


def gaps(manifests: Iterable[Manifest]) -> dict[str, tuple[Box, ...]]:
    """Return, by path, the boxes of the state that these manifests of one snapshot do not hold."""
    held = tuple(manifests)
    holdings = [holding for manifest in held for holding in manifest.holdings()]
    return uncovered_at(held[0].static.layout.arrays, holdings, step=held[0].step)


def reason_of(error: CorruptCopyError | OSError) -> str:
    """Return why a slot cannot be read, without what to do about it."""
    return error.message if isinstance(error, CorruptCopyError) else str(error)


def _read_slot(host: HostId, path: Path) -> Manifest | CorruptCopyError | OSError | Literal["gone"] | None:
    try:
        slot = open_slot(host, path)
    except FileNotFoundError:  # the job is ending
        return "gone"
    except (CorruptCopyError, OSError) as error:
        return error
    if slot is None:
        return None
    slot.close()
    return slot.manifest


def _newest_covered(manifests: Iterable[Manifest]) -> tuple[int, int] | None:
    by_order: defaultdict[tuple[int, int], list[Manifest]] = defaultdict(list)
    for manifest in manifests:
        by_order[manifest.order].append(manifest)
    return next((order for order in sorted(by_order, reverse=True) if not gaps(by_order[order])), None)


def _slot_info(
    host: HostId,
    path: Path,
    found: Manifest | CorruptCopyError | OSError | str | None,
    newest: tuple[int, int] | None,
) -> SlotInfo:
    name, slot = str(host), path.name
    try:
        file_bytes = path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        file_bytes = 0
    if isinstance(found, Manifest):
        return SlotInfo(
            host=name,
            slot=slot,
            state="complete",
            file_bytes=file_bytes,
            step=found.step,
            generation=found.generation,
            position=found.position,
            num_shards=len(found.static.shards),
            data_bytes=sum(entry.nbytes for entry in found.static.shards),
            is_newest_covered=found.order == newest,
        )
    if isinstance(found, (CorruptCopyError, OSError)):
        return SlotInfo(host=name, slot=slot, state="damaged", file_bytes=file_bytes, reason=reason_of(found))
    return SlotInfo(host=name, slot=slot, state="empty", file_bytes=file_bytes)
