"""Comparing copies of one state by their checksums: which differ, and who is to blame.

Copies of one box at one (step, generation) must be the same bytes. Where they are not, some memory, link or
processor has changed data without an error (silent corruption). Three slices or more out-vote the one that
is wrong; two only show that one of them is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.boxes import Box
from reshard.copy_numbers import ByHost, ShardNumbers, captured_by_host, held_by_host
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout

CHECKSUM_DTYPE = np.dtype("<u8")
"""How checksums cross processes: 8 bytes each, little-endian."""

Checksums = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """Where a copy of a box is: on a host, on the device at this mesh position (-1: in snapshot memory)."""

    host: HostId
    position: int = -1

    def __str__(self) -> str:
        return str(self.host) if self.position < 0 else f"{self.host} device {self.position}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One box whose copies differ.

    `copies_by_checksum` has the checksum that most copies have first. `good` is the checksum of the majority,
    None when no majority tells. `suspects` are slices: those with a copy that is not `good`, or all of them.
    """

    path: str
    box: Box
    copies_by_checksum: tuple[tuple[int, tuple[Copy, ...]], ...]
    good: int | None
    suspects: tuple[int, ...]

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices that have a copy of the box."""
        return tuple(
            sorted({copy.host.slice_index for _, copies in self.copies_by_checksum for copy in copies})
        )

    @property
    def suspect_copies(self) -> tuple[Copy, ...]:
        """The copies that may be wrong: all that are not `good`."""
        found = (copies for checksum, copies in self.copies_by_checksum if checksum != self.good)
        return tuple(sorted(copy for copies in found for copy in copies))


def judge_copies(path: str, box: Box, checksums: Mapping[Copy, int]) -> Disagreement | None:
    """Return who disagrees about one box, None when all copies are the same.

    The majority is one of slices: of three or more, more than half must have nothing but that checksum. Where
    only slices that are at odds with themselves differ from the others, more than half of all copies will
    do: so two copies within one slice never out-vote a slice that is of one mind.
    """
    copies: defaultdict[int, list[Copy]] = defaultdict(list)
    for copy, checksum in sorted(checksums.items()):
        copies[checksum].append(copy)
    if len(copies) < 2:
        return None
    ordered = sorted(copies.items(), key=lambda item: (-len(item[1]), item[1]))
    good = _majority(copies)
    blamed = (found for checksum, found in copies.items() if checksum != good)
    return Disagreement(
        path=path,
        box=box,
        copies_by_checksum=tuple((checksum, tuple(found)) for checksum, found in ordered),
        good=good,
        suspects=tuple(sorted({copy.host.slice_index for found in blamed for copy in found})),
    )


def _majority(copies: Mapping[int, Sequence[Copy]]) -> int | None:
    checksums_of: defaultdict[int, set[int]] = defaultdict(set)
    for checksum, found in copies.items():
        for copy in found:
            checksums_of[copy.host.slice_index].add(checksum)
    whole = [next(iter(own)) for own in checksums_of.values() if len(own) == 1]
    num_slices, num_copies = len(checksums_of), sum(map(len, copies.values()))
    for checksum, found in copies.items():
        if num_slices >= 3 and 2 * whole.count(checksum) > num_slices:
            return checksum
        only_torn_differ = len(whole) < num_slices and set(whole) <= {checksum}
        if only_torn_differ and 2 * len(found) > num_copies:
            return checksum
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyIndex:
    """Which boxes the checksums of each host are of: made once for a world, compares many times.

    The `i`-th checksum of a host is that of `shards[ids[host][i]]`, from the device at mesh position
    `positions[host][i]` (-1: from snapshot memory).
    """

    shards: ShardNumbers
    ids: Mapping[HostId, npt.NDArray[np.int64]] = field(repr=False)
    positions: Mapping[HostId, npt.NDArray[np.int64]] = field(repr=False)

    @classmethod
    def of_captures(cls, layout: Layout, replicas: int) -> CopyIndex:
        """Index what `reshard.captures` answers: a host's checksums are in the order of its shards."""
        shards = ShardNumbers(layout)
        ids = captured_by_host(layout, replicas, shards)
        hosts = layout.mesh.distinct_hosts()
        positions = ByHost(hosts, lambda host: np.full(len(ids[hosts[host]]), -1))
        return cls(shards=shards, ids=ids, positions=positions)

    @classmethod
    def of_devices(cls, layout: Layout) -> CopyIndex:
        """Index what all devices hold: array by array, the devices of a host in the order of the mesh."""
        shards = ShardNumbers(layout)
        places = device_positions(layout)
        hosts = tuple(places)
        return cls(
            shards=shards,
            ids=held_by_host(layout, places, shards),
            positions=ByHost(hosts, lambda host: np.tile(places[hosts[host]], len(layout.arrays))),
        )

    def compare(self, checksums: Mapping[HostId, bytes]) -> tuple[Disagreement, ...]:
        """Return what disagrees among these hosts, sorted; empty when all agree.

        `checksums` are packed as `pack_checksums` does. Raises UsageError for a host that is not in the index
        or a number of checksums that does not fit it.
        """
        values = {host: self._unpack(host, packed) for host, packed in checksums.items()}
        if not values:
            return ()
        ids = np.concatenate([self.ids[host] for host in values])
        found = np.concatenate(list(values.values()))
        first = np.zeros(len(self.shards), CHECKSUM_DTYPE)
        first[ids] = found  # any of a box's copies will do: all must be like it
        differing = np.unique(ids[found != first[ids]])
        return tuple(sorted(self._judge(differing, values), key=lambda found: (found.path, found.box)))

    def fits(self, host: HostId, checksums: bytes) -> bool:
        """Tell whether `checksums` can be those of a host."""
        return host in self.ids and len(checksums) == CHECKSUM_DTYPE.itemsize * len(self.ids[host])

    def num_compared(self, hosts: Iterable[HostId]) -> int:
        """Return the number of boxes of which these hosts have more than one copy."""
        ids = [self.ids[host] for host in hosts]
        return int(np.count_nonzero(np.bincount(np.concatenate(ids)) > 1)) if ids else 0

    def _unpack(self, host: HostId, packed: bytes) -> npt.NDArray[Any]:
        if not self.fits(host, packed):
            expected = len(self.ids.get(host, ()))
            raise UsageError(
                f"{len(packed)} bytes of checksums from {host}, expected {expected} of 8 bytes",
                host=str(host),
            )
        return np.frombuffer(packed, CHECKSUM_DTYPE)

    def _judge(
        self, differing: npt.NDArray[np.int64], values: Mapping[HostId, npt.NDArray[Any]]
    ) -> Iterable[Disagreement]:
        copies: dict[int, dict[Copy, int]] = {int(shard): {} for shard in differing}
        for host, own in values.items():
            for place in np.flatnonzero(np.isin(self.ids[host], differing)).tolist():
                copy = Copy(host, int(self.positions[host][place]))
                copies[int(self.ids[host][place])][copy] = int(own[place])
        for shard, checksums in copies.items():
            judged = judge_copies(*self.shards[shard], checksums)
            if judged is not None:
                yield judged


def device_positions(layout: Layout) -> dict[HostId, npt.NDArray[np.int64]]:
    """Return the mesh positions (in C order) of each host's devices, ascending; hosts in order."""
    index = layout.mesh.host_index()
    order = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index))
    return dict(zip(layout.mesh.distinct_hosts(), np.split(order, ends[:-1]), strict=True))


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Pack checksums to be sent, 8 bytes each."""
    return np.array(checksums, CHECKSUM_DTYPE).tobytes()
