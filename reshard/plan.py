"""Transfers and plans as frozen values: checked, printable, and readable as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from reshard.boxes import Box, contains, format_box, volume
from reshard.errors import UsageError
from reshard.holdings import Tier
from reshard.ids import HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copy `piece` of array `path` from the source's shard `source_box` into the target's `target_box`.

    `nbytes` is that of the piece; `tier` is where the source has the shard. A transfer from a host to
    itself is local and moves nothing over the network. Raises `UsageError` unless the piece has elements
    and lies in both boxes.
    """

    path: str
    source: HostId
    target: HostId
    source_box: Box
    piece: Box
    target_box: Box
    nbytes: int
    tier: Tier = "shm"

    def __post_init__(self) -> None:
        num_elements = volume(self.piece)
        ranks_agree = len(self.piece) == len(self.source_box) == len(self.target_box)
        if not (
            ranks_agree and contains(self.source_box, self.piece) and contains(self.target_box, self.piece)
        ):
            raise UsageError(f"{self}: the piece is not inside both boxes", path=self.path)
        if num_elements < 1 or self.nbytes < 1 or self.nbytes % num_elements:
            raise UsageError(f"{self}: {self.nbytes} bytes for {num_elements} elements", path=self.path)

    def __str__(self) -> str:
        return f"{self.path}{format_box(self.piece)} {self.source} → {self.target}"

    @property
    def is_local(self) -> bool:
        """Whether source and target are one host."""
        return self.source == self.target

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.nbytes // volume(self.piece)

    @property
    def order(self) -> tuple[HostId, str, Box, Box, HostId]:
        """The key plans are sorted by."""
        return self.target, self.path, self.target_box, self.piece, self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The transfers that give every target host its boxes of the state at `step`, sorted by target.

    `bytes_moved` crosses the network, `bytes_local` does not; `bytes_lower_bound` is what no plan can
    move less than: the bytes that a target host needs and does not hold. Raises `UsageError` when the
    sums disagree with the transfers.
    """

    step: int
    transfers: tuple[Transfer, ...]
    bytes_moved: int
    bytes_lower_bound: int
    bytes_local: int

    def __post_init__(self) -> None:
        local = sum(transfer.nbytes for transfer in self.transfers if transfer.is_local)
        moved = sum(transfer.nbytes for transfer in self.transfers) - local
        if (moved, local) != (self.bytes_moved, self.bytes_local):
            raise UsageError(
                f"the plan says it moves {self.bytes_moved} bytes and copies {self.bytes_local} locally, "
                f"its transfers {moved} and {local}"
            )

    @classmethod
    def of(cls, step: int, transfers: Iterable[Transfer], *, bytes_lower_bound: int) -> Plan:
        """Return the plan of these transfers, sorted, with its sums."""
        ordered = tuple(sorted(transfers, key=lambda transfer: transfer.order))
        local = sum(transfer.nbytes for transfer in ordered if transfer.is_local)
        return cls(
            step=step,
            transfers=ordered,
            bytes_moved=sum(transfer.nbytes for transfer in ordered) - local,
            bytes_lower_bound=bytes_lower_bound,
            bytes_local=local,
        )

    def for_target(self, host: HostId) -> tuple[Transfer, ...]:
        """Return the transfers into one host, local ones included, in plan order."""
        return tuple(transfer for transfer in self.transfers if transfer.target == host)

    def bytes_sent(self) -> dict[HostId, int]:
        """Return the network bytes each source sends; hosts that send nothing are absent."""
        sent: Counter[HostId] = Counter()
        for transfer in self.transfers:
            if not transfer.is_local:
                sent[transfer.source] += transfer.nbytes
        return dict(sorted(sent.items()))

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes, local and moved, that come from each tier used."""
        by_tier: Counter[Tier] = Counter()
        for transfer in self.transfers:
            by_tier[transfer.tier] += transfer.nbytes
        return dict(sorted(by_tier.items()))

    def to_json(self) -> bytes:
        """Return the plan as one JSON object that `from_json` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Plan:
        """Read what `to_json` wrote; raises `UsageError` naming the first field that does not fit."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise UsageError(f"this is not a plan: {error}") from error

    def table(self) -> str:
        """Return the plan as text: a line for each target and source, then the totals in bytes."""
        counts: Counter[tuple[HostId, HostId, Tier]] = Counter()
        nbytes: Counter[tuple[HostId, HostId, Tier]] = Counter()
        for transfer in self.transfers:
            route = (transfer.target, transfer.source, transfer.tier)
            counts[route] += 1
            nbytes[route] += transfer.nbytes
        lines = [f"{'target':<10} {'source':<10} {'from':<10} {'transfers':>9} {'bytes':>18}"]
        for target, source, tier in sorted(counts):
            route = (target, source, tier)
            origin = "itself" if target == source else str(source)
            lines.append(f"{target!s:<10} {origin:<10} {tier:<10} {counts[route]:>9} {nbytes[route]:>18,}")
        lines.append(
            f"step {self.step}: {self.bytes_moved:,} bytes over the network "
            f"(lower bound {self.bytes_lower_bound:,}), {self.bytes_local:,} local"
        )
        return "\n".join(lines)
