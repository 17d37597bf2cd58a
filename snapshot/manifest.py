"""What a slot holds: the static part, fixed for a world, and the part that changes at each capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from reshard import lineage
from reshard.boxes import Box
from reshard.errors import CorruptCopyError, UsageError
from reshard.holdings import Holding, Tier
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from snapshot.shm import align
from snapshot.slot_header import FORMAT_VERSION, SHARD_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard of the slot: `nbytes` in C order at `offset` bytes from the start of the shard data."""

    path: str
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticManifest:
    """The part of a manifest that stays the same from step to step, as long as the world does.

    `layout` is that of the whole state; `shards` are those of this host, in slot order.
    """

    format_version: int
    host: HostId
    layout: Layout
    shards: tuple[ShardEntry, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of the shard data, with alignment."""
        last = self.shards[-1] if self.shards else None
        return 0 if last is None else align(last.offset + last.nbytes, SHARD_ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete snapshot of one host: `checksums[i]` is that of `static.shards[i]`.

    `position` is the place in the sample stream after this step.
    """

    static: StaticManifest
    step: int
    generation: int
    position: int
    checksums: tuple[int, ...]

    @property
    def order(self) -> tuple[int, int]:
        """Sorts snapshots from old to new: a later generation replaces what an earlier one went on to."""
        return self.generation, self.step

    def holdings(self, tier: Tier = "shm") -> tuple[Holding, ...]:
        """Return a holding for each shard, in slot order."""
        return tuple(
            Holding(
                host=self.static.host,
                step=self.step,
                path=entry.path,
                box=entry.box,
                checksum=checksum,
                tier=tier,
            )
            for entry, checksum in zip(self.static.shards, self.checksums, strict=True)
        )


_encoder = msgspec.msgpack.Encoder()
_static_decoder = msgspec.msgpack.Decoder(StaticManifest)


def make_static(host: HostId, layout: Layout, shards: Iterable[tuple[str, Box]]) -> StaticManifest:
    """Give each (path, box) its place in a slot, in the order given.

    Raises UsageError for a path that the layout lacks or a shard named twice.
    """
    arrays: dict[str, ArrayLayout] = {array.path: array for array in layout.arrays}
    entries: list[ShardEntry] = []
    seen: set[tuple[str, Box]] = set()
    offset = 0
    for path, box in shards:
        if path not in arrays:
            raise UsageError(f"shard of {path!r}, an array that the layout does not have", path=path)
        if (path, box) in seen:
            raise UsageError(f"shard of {path!r} listed twice", path=path, box=box)
        seen.add((path, box))
        nbytes = arrays[path].box_nbytes(box)
        entries.append(ShardEntry(path=path, box=box, offset=offset, nbytes=nbytes))
        offset = align(offset + nbytes, SHARD_ALIGNMENT)
    return StaticManifest(format_version=FORMAT_VERSION, host=host, layout=layout, shards=tuple(entries))


def encode_static(static: StaticManifest) -> bytes:
    """Write the static part as it stands in a slot (MessagePack)."""
    return _encoder.encode(static)


def decode_static(data: bytes, *, data_bytes: int | None = None) -> StaticManifest:
    """Read a static part; with `data_bytes`, also check that every shard lies within the shard data.

    Raises CorruptCopyError for bytes that are not one.
    """
    try:
        static = _static_decoder.decode(data)
    except (msgspec.MsgspecError, UsageError, RecursionError) as error:
        raise CorruptCopyError(f"bad static manifest: {error}") from error
    for entry in static.shards if data_bytes is not None else ():
        if entry.offset < 0 or entry.nbytes < 0 or entry.offset + entry.nbytes > (data_bytes or 0):
            raise CorruptCopyError(
                f"bad static manifest: shard of {entry.path!r} lies outside the shard data"
            )
    return static


def is_on_lineage(manifest: Manifest, restored_steps: Mapping[int, int]) -> bool:
    """Tell whether the job still stands on this snapshot; see `reshard.lineage`."""
    return lineage.is_on_lineage(manifest.step, manifest.generation, restored_steps)
