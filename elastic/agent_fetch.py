"""Pieces of a snapshot for an agent's stage or digest: out of its own arena, and out of its peers'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic.events import ComputeDigest, Stage
from elastic.members import host_of, member_of
from reshard.boxes import Box, intersect
from reshard.errors import MissingShardError
from reshard.ids import HostId
from reshard.transfer import Transfer
from reshard.write_counts import WriteCounts
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.dataplane import TlsFiles, Wanted, fetch
from snapshot.slot import Bytes

FETCH_DEADLINE_S = 60.0

Want = tuple[str, Box]
"""A piece of an array: its path, and its box within one stored shard."""
Pieces = dict[Want, tuple[HostId, ...]]
"""Pieces and the hosts that have each, the one to prefer first."""
Fetch = Callable[[Stage | ComputeDigest, HostId, Sequence[Want]], list[Bytes]]
"""Reads pieces of the commanded snapshot, verified and in this order, out of another host's memory.

Raises ElasticError or OSError when it cannot.
"""


@dataclass(frozen=True, slots=True)
class Filled:
    """The checksums of the pieces, in their order, and which copies were passed over for others, and why."""

    checksums: tuple[int, ...]
    rejected: tuple[str, ...] = ()


class PieceFetcher:
    """Reads pieces for one host; peers' memory through `fetch`, without one over the data plane."""

    def __init__(
        self,
        arena: Arena,
        host: HostId,
        token: str,
        *,
        fetch: Fetch | None,
        tls: TlsFiles | None,
        hosts_per_slice: int = 1,
    ) -> None:
        self._arena = arena
        self._host = host
        self._token = token
        self._fetch = fetch
        self._tls = tls
        self._hosts_per_slice = hosts_per_slice

    def read_local(self, command: Stage | ComputeDigest, want: Want) -> Bytes:
        """A piece out of this host's own memory, verified. Raises MissingShardError."""
        [data] = read_pieces(self._arena, command.step, command.of_generation, [want])
        return data

    def fill(self, command: Stage | ComputeDigest, pieces: Pieces, views: Sequence[memoryview]) -> Filled:
        """Fill `views`, one for each piece and of its bytes, verified. Raises ElasticError or OSError."""
        into = dict(zip(pieces, views, strict=True))
        checksums: dict[Want, int] = {}
        local = [want for want, sources in pieces.items() if sources[0] == self._host]
        found = read_pieces(self._arena, command.step, command.of_generation, local)
        for want, data in zip(local, found, strict=True):
            into[want][:] = data.data
            checksums[want] = checksum(data)
        remote = {want: sources for want, sources in pieces.items() if want not in checksums}
        rejected: tuple[str, ...] = ()
        if self._fetch is None:
            fetched, rejected = self._from_agents(command, remote, into)
            checksums.update(fetched)
        else:
            for source in sorted({sources[0] for sources in remote.values()}):
                wanted = [want for want, sources in remote.items() if sources[0] == source]
                for want, data in zip(wanted, self._fetch(command, source, wanted), strict=True):
                    into[want][:] = data.data
                    checksums[want] = checksum(data)
        return Filled(tuple(checksums[want] for want in pieces), rejected)

    def _from_agents(
        self, command: Stage | ComputeDigest, pieces: Pieces, into: dict[Want, memoryview]
    ) -> tuple[dict[Want, int], tuple[str, ...]]:
        wanted = [
            Wanted(
                path=path,
                box=box,
                sources=self._addresses(command, (path, box), sources),
                into=into[path, box],
            )
            for (path, box), sources in pieces.items()
        ]
        fetched = fetch(
            wanted,
            token=self._token,
            generation=command.generation,
            step=command.step,
            of_generation=command.of_generation,
            deadline_s=FETCH_DEADLINE_S,
            tls=self._tls,
        )
        return dict(zip(pieces, fetched.checksums, strict=True)), fetched.rejected

    def _addresses(
        self, command: Stage | ComputeDigest, want: Want, sources: Sequence[HostId]
    ) -> tuple[str, ...]:
        """Where the sources serve; raises MissingShardError when all their agents went away while it was
        planned.
        """
        found = [command.addresses.get(member_of(source, self._hosts_per_slice)) for source in sources]
        present = tuple(address for address in found if address)
        if not present:
            raise MissingShardError(*want, command.step, lost=sources)
        return present


def wanted_pieces(
    transfers: Sequence[Transfer], alternates: Sequence[tuple[int, ...]] = (), hosts_per_slice: int = 1
) -> Pieces:
    """The pieces that the transfers name, each once, with who has it, the planned source first.

    `alternates[i]` are other members that have what `transfers[i]` moves.
    """
    pieces: dict[Want, tuple[HostId, ...]] = {}
    for index, transfer in enumerate(transfers):
        others = alternates[index] if index < len(alternates) else ()
        sources = (transfer.source, *(host_of(member, hosts_per_slice) for member in others))
        pieces.setdefault((transfer.path, transfer.piece), tuple(dict.fromkeys(sources)))
    return pieces


def check_staged(command: Stage, staged: Iterable[Want], arena: Arena) -> None:
    """Count what was staged, and what the host held before, in each box that something was fetched for.

    Raises InvariantBrokenError unless each element was staged exactly once, or not at all and held.
    """
    counts: defaultdict[str, dict[Box, WriteCounts]] = defaultdict(dict)
    for transfer in command.transfers:
        path, box = transfer.path, transfer.target_box
        counts[path].setdefault(box, WriteCounts(path, box))
    for path, piece in staged:
        for box, counted in counts[path].items():
            if (common := intersect(piece, box)) is not None:
                counted.add(common)
    source = arena.find_shards(command.step, command.of_generation)
    source.close()
    for path, boxes in counts.items():
        for box, counted in boxes.items():
            counted.check_at_most_once()
            for held in source.boxes(path):
                if (common := intersect(held, box)) is not None:
                    counted.fill(common)
            counted.check_once()


def read_pieces(arena: Arena, step: int, generation: int, wants: Sequence[Want]) -> list[Bytes]:
    """Pieces of what workers captured, out of an arena here, verified. Raises MissingShardError."""
    source = arena.find_captured(step, generation)
    try:
        return [_as_bytes(source.read_piece(path, box)) for path, box in wants]
    finally:
        source.close()


def _as_bytes(elements: np.ndarray[Any, np.dtype[Any]]) -> Bytes:
    return elements.reshape(-1).view(np.uint8) if elements.size else np.empty(0, np.uint8)
