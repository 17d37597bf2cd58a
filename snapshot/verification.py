"""Reading everything a job has in host memory, and saying what is damaged and which copies disagree.

Reads only, and takes no lock. A live job overwrites slots while they are read: the commit word tells that
apart from damage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.boxes import Box
from reshard.coverage import uncovered_at
from reshard.errors import CorruptCopyError
from reshard.holdings import Holding
from reshard.ids import HostId
from snapshot.locate import FoundJob, slot_files
from snapshot.manifest import Manifest
from snapshot.mapped_slot import MappedSlot, open_slot
from snapshot.survey import reason_of

_ATTEMPTS = 3
_MIN_COPIES_FOR_MAJORITY = 3

_Copies = list[tuple[Manifest, list[Holding]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A slot, or one shard in it, that cannot be trusted."""

    host: str
    slot: str
    reason: str
    step: int | None = None
    generation: int | None = None
    path: str | None = None
    box: Box | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Copies of one box of one snapshot that are intact and yet differ: they were captured so.

    `hosts_by_checksum` maps each checksum, in hex, to the hosts that have it; `suspects` are those that more
    than half of three or more copies contradict.
    """

    step: int
    generation: int
    path: str
    box: Box
    hosts_by_checksum: dict[str, tuple[str, ...]]
    suspects: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """One snapshot, counting only shards that are intact; `missing` lists the boxes they do not cover."""

    step: int
    generation: int
    hosts: tuple[str, ...]
    num_shards: int
    verified_bytes: int
    is_covered: bool
    missing: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What reading every shard of a job found, the newest snapshot first.

    `overwritten` names the slots that the job wrote anew each time they were read.
    """

    snapshots: tuple[SnapshotInfo, ...]
    damages: tuple[Damage, ...]
    disagreements: tuple[Disagreement, ...]
    overwritten: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged and all copies agree."""
        return not self.damages and not self.disagreements


def verify_job(job: FoundJob) -> Verification:
    """Read every shard of every slot of every host of a job, and compare the copies of each box."""
    damages: list[Damage] = []
    overwritten: list[str] = []
    by_order: defaultdict[tuple[int, int], _Copies] = defaultdict(list)
    for host, path in slot_files(job):
        try:
            copy = _verify_slot(host, path, damages)
        except _OverwrittenError:
            overwritten.append(f"{host}/{path.name}")
        else:
            if copy is not None:
                by_order[copy[0].order].append(copy)
    newest_first = [by_order[order] for order in sorted(by_order, reverse=True)]
    return Verification(
        snapshots=tuple(map(_snapshot_info, newest_first)),
        damages=tuple(damages),
        disagreements=tuple(found for copies in newest_first for found in _disagreements(copies)),
        overwritten=tuple(overwritten),
    )


class _OverwrittenError(Exception):
    """The job wrote the slot while it was read."""


def _verify_slot(host: HostId, path: Path, damages: list[Damage]) -> tuple[Manifest, list[Holding]] | None:
    """Return a slot's manifest and its intact shards, None when it holds nothing."""
    for _ in range(_ATTEMPTS):
        try:
            slot = open_slot(host, path)
        except FileNotFoundError:  # the job is ending
            return None
        except (CorruptCopyError, OSError) as error:
            damages.append(Damage(host=str(host), slot=path.name, reason=reason_of(error)))
            return None
        if slot is None:
            return None
        try:
            intact, found = _read_shards(slot)
        except _OverwrittenError:
            continue
        finally:
            slot.close()
        damages += found
        return slot.manifest, intact
    raise _OverwrittenError


def _read_shards(slot: MappedSlot) -> tuple[list[Holding], list[Damage]]:
    intact: list[Holding] = []
    damages: list[Damage] = []
    for index, holding in enumerate(slot.manifest.holdings()):
        try:
            slot.reader.check_shard(index)
        except CorruptCopyError as error:
            if not slot.is_current():
                raise _OverwrittenError from error
            damages.append(
                Damage(
                    host=str(slot.host),
                    slot=slot.path.name,
                    reason="its bytes do not match their checksum",
                    step=holding.step,
                    generation=slot.manifest.generation,
                    path=holding.path,
                    box=holding.box,
                )
            )
        else:
            intact.append(holding)
    return intact, damages


def _snapshot_info(copies: _Copies) -> SnapshotInfo:
    manifest = copies[0][0]
    arrays = {array.path: array for array in manifest.static.layout.arrays}
    holdings = [holding for _, held in copies for holding in held]
    missing = uncovered_at(arrays.values(), holdings, step=manifest.step)
    return SnapshotInfo(
        step=manifest.step,
        generation=manifest.generation,
        hosts=tuple(sorted({str(manifest.static.host) for manifest, held in copies if held})),
        num_shards=len(holdings),
        verified_bytes=sum(arrays[holding.path].box_nbytes(holding.box) for holding in holdings),
        is_covered=not missing,
        missing=tuple((path, box) for path, boxes in missing.items() for box in boxes),
    )


def _disagreements(copies: _Copies) -> Iterator[Disagreement]:
    hosts: defaultdict[tuple[str, Box], defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for _, held in copies:
        for holding in held:
            hosts[holding.path, holding.box][holding.checksum].append(str(holding.host))
    for (path, box), by_checksum in sorted(hosts.items()):
        if len(by_checksum) > 1:
            yield Disagreement(
                step=copies[0][0].step,
                generation=copies[0][0].generation,
                path=path,
                box=box,
                hosts_by_checksum={f"{key:016x}": tuple(names) for key, names in by_checksum.items()},
                suspects=_suspects(list(by_checksum.values())),
            )


def _suspects(groups: Sequence[list[str]]) -> tuple[str, ...]:
    num_copies = sum(map(len, groups))
    largest = max(groups, key=len)
    if num_copies < _MIN_COPIES_FOR_MAJORITY or 2 * len(largest) <= num_copies:
        return ()
    return tuple(sorted(name for group in groups if group is not largest for name in group))
