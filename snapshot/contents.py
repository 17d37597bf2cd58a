"""What slot files hold: the complete snapshots, the intact shards, and what was rejected and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CorruptCopyError
from reshard.holdings import Holding
from snapshot.manifest import Manifest
from snapshot.slot_reader import SlotReader
from snapshot.source import ShardSource, StoredCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedCopy:
    """A file, or a shard in it, that cannot be trusted, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaContents:
    """What an arena holds: complete snapshots, the newest first, and what was rejected."""

    complete: tuple[Manifest, ...]
    rejected: tuple[RejectedCopy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedHoldings:
    """The shards whose bytes match their checksum, and what was rejected."""

    holdings: tuple[Holding, ...]
    rejected: tuple[RejectedCopy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSnapshots:
    """Complete snapshots, each with those of its shards whose bytes match, and what was rejected."""

    snapshots: tuple[tuple[Manifest, tuple[Holding, ...]], ...]
    rejected: tuple[RejectedCopy, ...]


def complete_slots(
    paths: Iterable[Path], rejected: list[RejectedCopy]
) -> Iterator[tuple[SlotReader, Manifest]]:
    """Yield an open reader of each complete slot, to be closed by the caller; note what is damaged."""
    for path in paths:
        reader: SlotReader | None = None
        manifest: Manifest | None = None
        try:
            reader = SlotReader(path)
            manifest = reader.read_manifest()
        except FileNotFoundError:
            continue
        except CorruptCopyError as error:
            rejected.append(RejectedCopy(name=path.name, reason=error.message))
        except OSError as error:
            rejected.append(RejectedCopy(name=path.name, reason=str(error)))
        if reader is not None and manifest is not None:
            yield reader, manifest
        elif reader is not None:
            reader.close()


def read_contents(paths: Iterable[Path]) -> ArenaContents:
    """Return the manifests in these files, the newest first; shard bytes are not read."""
    complete: list[Manifest] = []
    rejected: list[RejectedCopy] = []
    for reader, manifest in complete_slots(paths, rejected):
        complete.append(manifest)
        reader.close()
    complete.sort(key=lambda manifest: manifest.order, reverse=True)
    return ArenaContents(complete=tuple(complete), rejected=tuple(rejected))


def verify_snapshots(paths: Iterable[Path]) -> VerifiedSnapshots:
    """Read all shards and return each complete snapshot with those that match their checksum."""
    snapshots: list[tuple[Manifest, tuple[Holding, ...]]] = []
    rejected: list[RejectedCopy] = []
    for reader, manifest in complete_slots(paths, rejected):
        with reader:
            snapshots.append((manifest, tuple(_intact(reader, manifest, rejected))))
    return VerifiedSnapshots(snapshots=tuple(snapshots), rejected=tuple(rejected))


def _intact(reader: SlotReader, manifest: Manifest, rejected: list[RejectedCopy]) -> Iterator[Holding]:
    for index, holding in enumerate(manifest.holdings()):
        try:
            reader.check_shard(index)
        except CorruptCopyError as error:
            rejected.append(RejectedCopy(name=reader.path.name, reason=error.message))
        else:
            yield holding


def verify_contents(paths: Iterable[Path], step: int | None) -> VerifiedHoldings:
    """Read all shards (of `step`, if given) and return those that match their checksum."""
    holdings: list[Holding] = []
    rejected: list[RejectedCopy] = []
    for reader, manifest in complete_slots(paths, rejected):
        with reader:
            if step in (None, manifest.step):
                holdings += _intact(reader, manifest, rejected)
    return VerifiedHoldings(holdings=tuple(holdings), rejected=tuple(rejected))


def open_source(
    paths: Iterable[Path],
    step: int,
    generations: Collection[int] | None = None,
    left_out: Collection[StoredCopy] = (),
) -> ShardSource:
    """Return a reader of all these files hold of a step, captured in one of `generations` (None: any).

    The copies in `left_out` are not read.
    """
    matching: list[tuple[SlotReader, Manifest]] = []
    for reader, manifest in complete_slots(paths, []):
        if manifest.step == step and (generations is None or manifest.generation in generations):
            matching.append((reader, manifest))
        else:
            reader.close()
    return ShardSource(step, matching, left_out)
