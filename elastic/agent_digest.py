"""The digest of a whole state, out of the memory of all hosts that hold a part of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from elastic.agent_fetch import PieceFetcher, Want, wanted_pieces
from elastic.events import ComputeDigest
from reshard.boxes import full_box
from reshard.execute import Buffer, execute_transfers
from reshard.holdings import Shard
from reshard.ids import HostId
from reshard.layout import ArrayLayout
from reshard.transfer import Transfer
from snapshot.digest import state_digest

ROUND_BYTES = 32 << 20
"""Arrays that are put together at a time: what a digest takes of a host's memory, twice that where they were
cut. So little that the same memory serves for each round: in a recovery others wait for the processors."""

FlatArray = tuple[str, str, tuple[int, ...], Any]


def digest_from_memory(
    command: ComputeDigest,
    host: HostId,
    fetcher: PieceFetcher,
    *,
    count_writes: bool = False,
    round_bytes: int = ROUND_BYTES,
) -> str:
    """Bring every array whole to this host, in rounds, and hash it. Raises ElasticError or OSError."""
    by_path: defaultdict[str, list[Transfer]] = defaultdict(list)
    for transfer in command.transfers:
        by_path[transfer.path].append(transfer)

    def arrays() -> Iterator[FlatArray]:
        apart: list[ArrayLayout] = []
        for array in command.layout.arrays:
            want = None if count_writes else _whole_here(array, by_path[array.path], host)
            if want is None:
                apart.append(array)
            else:
                yield array.path, array.dtype, array.shape, fetcher.read_local(command, want)
        for round_ in rounds(apart, round_bytes):
            described = {array.path: array for array in round_}
            transfers = [transfer for path in described for transfer in by_path[path]]
            buffers = _gather(command, transfers, set(described), host, fetcher, count_writes=count_writes)
            for (path, _), buffer in buffers.items():
                array = described[path]
                yield path, array.dtype, array.shape, buffer.reshape(-1).view(np.uint8)

    return state_digest(arrays())


def _whole_here(array: ArrayLayout, transfers: Sequence[Transfer], host: HostId) -> Want | None:
    """The piece that is all of the array, where this host has that."""
    if len(transfers) != 1 or transfers[0].source != host or transfers[0].piece != full_box(array.shape):
        return None
    return array.path, transfers[0].piece


def rounds(arrays: Iterable[ArrayLayout], max_bytes: int) -> Iterator[list[ArrayLayout]]:
    """Yield the arrays in rounds of at most `max_bytes`; a larger array is a round of its own."""
    round_: list[ArrayLayout] = []
    room = max_bytes
    for array in arrays:
        if round_ and array.nbytes > room:
            yield round_
            round_, room = [], max_bytes
        round_.append(array)
        room -= array.nbytes
    if round_:
        yield round_


def _gather(
    command: ComputeDigest,
    transfers: Sequence[Transfer],
    paths: Collection[str],
    host: HostId,
    fetcher: PieceFetcher,
    *,
    count_writes: bool,
) -> dict[Shard, Buffer]:
    wanted = wanted_pieces(transfers)
    pieces = {(t.path, t.piece): np.empty(t.nbytes, np.uint8) for t in transfers}
    fetcher.fill(command, wanted, [memoryview(cast("bytearray", pieces[want])) for want in wanted])
    return execute_transfers(
        transfers,
        command.layout,
        host,
        lambda transfer: pieces[transfer.path, transfer.piece],
        paths=paths,
        count_writes=count_writes,
    ).buffers
