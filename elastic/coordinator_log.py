"""What a coordinator writes down for the one after it: the machine's state before each turn's commands are
performed, the runtime services that run, and the history.

    DIR/coordinator-log/state-N   the newest entry of the coordinator of epoch N, replaced whole
    DIR/events.jsonl              the history; an entry knows what of its turn must be in it

An entry is in place before its commands are. It outlives its process at once; it is forced to disk first only
where another machine may take over (`elastic/job.py`, `arbiter`): the power of this one takes all else along.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from elastic.file_arbiter import sync_directory
from elastic.history import HistoryWriter
from elastic.job import HISTORY_FILE, LOG_DIRECTORY
from elastic.members import member_of
from elastic.records import Record, StepCommitted, decode_record, encode_record
from elastic.runtime_service import ServiceRecord
from elastic.saved_state import SavedState, durable_part, save
from elastic.state import JobState
from reshard.errors import ElasticError
from reshard.ids import HostId

REFRESH_EVERY_S = 30.0
"""An entry is written anew after so long, so that little of the history has to be read after it."""
_NAME = "state-"


class LogDamagedError(ElasticError):
    """The last coordinator's entry cannot be read."""

    kind = "log-damaged"
    remedy = "Start the job anew; with --persist-dir it goes on from the newest snapshot there."


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One state, and all that was true with it. `records` are those of the turn that led to it, which follow
    in the history from `history_bytes` on, or have to. `committed` is each member's newest step in the world.
    """

    state: SavedState
    services: tuple[ServiceRecord, ...]
    history_bytes: int
    records: tuple[bytes, ...]
    committed: dict[int, int]


class CoordinatorLog:
    """The log of one coordinator. `check` is called before each write, and raises when it may not write."""

    def __init__(
        self,
        directory: Path,
        epoch: int,
        check: Callable[[], None],
        *,
        is_shared: bool = False,
        hosts_per_slice: int = 1,
    ) -> None:
        self._hosts_per_slice = hosts_per_slice
        self._directory = directory / LOG_DIRECTORY
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path = self._directory / f"{_NAME}{epoch}"
        self._check = check
        self._is_shared = is_shared
        self._durable: SavedState | None = None
        self._written_s = float("-inf")
        self.committed: dict[int, int] = {}
        check()
        self.history = HistoryWriter(directory / HISTORY_FILE)

    def take_over(self) -> Entry | None:
        """The entry of the coordinator before this one, None when there was none.

        The history has all that belongs there then, and `committed` what it tells. Raises LogDamagedError.
        """
        entry = _newest_entry(self._directory)
        if entry is None:
            return None
        lines = self.history.lines_from(entry.history_bytes)
        there = set(lines)
        for line in entry.records:
            if line not in there:
                self.write(decode_record(line))
        self.committed = _committed_since(entry, [*lines, *entry.records], self._hosts_per_slice)
        newest = max([entry.state.newest_committed, *self.committed.values()])
        if not entry.state.rehearsing:
            entry = replace(entry, state=replace(entry.state, newest_committed=newest))
        return entry

    def ahead(
        self, state: JobState, now_s: float, records: Iterable[Record], services: tuple[ServiceRecord, ...]
    ) -> None:
        """Write down what the coordinator is about to do, if the one after it has to know."""
        durable = durable_part(state)
        if durable == self._durable and now_s - self._written_s < REFRESH_EVERY_S:
            return
        self._check()
        self._durable, self._written_s = durable, now_s
        entry = Entry(
            state=save(state, now_s),
            services=services,
            history_bytes=self.history.size(),
            records=tuple(map(encode_record, records)),
            committed=self.committed,
        )
        self._replace(msgspec.msgpack.encode(entry))

    def write(self, record: Record) -> None:
        """Append to the history."""
        self._check()
        self.history.write(record)

    def note_commit(self, record: StepCommitted, world_generation: int) -> bool:
        """Append a step's commit, if it is of the present world and new; tells whether it was.

        Also while that world is being left: what it committed may be what the next one goes on from.
        """
        member = _member_of(record, self._hosts_per_slice)
        newest = self.committed.get(member, -1)
        if record.generation != world_generation or record.step <= newest:
            return False
        self.write(record)
        self.committed[member] = record.step
        return True

    def close(self) -> None:
        """Close the history."""
        self.history.close()

    def _replace(self, body: bytes) -> None:
        unfinished = self._path.with_suffix(".part")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
            file.flush()
            if self._is_shared:
                self.history.sync()
                os.fsync(file.fileno())
        unfinished.replace(self._path)
        if self._is_shared:
            sync_directory(self._directory)


def _newest_entry(directory: Path) -> Entry | None:
    found = {path.name.removeprefix(_NAME): path for path in directory.glob(f"{_NAME}*")}
    epochs = [int(epoch) for epoch in found if epoch.isdecimal()]
    if not epochs:
        return None
    path = found[str(max(epochs))]
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Entry)
    except (msgspec.MsgspecError, ElasticError) as error:
        raise LogDamagedError(f"{path} cannot be read: {error}") from error


def _committed_since(entry: Entry, lines: Iterable[bytes], hosts_per_slice: int) -> dict[int, int]:
    """Each member's newest step of the entry's world, with what the history has after the entry."""
    committed = dict(entry.committed)
    for line in lines:
        record = decode_record(line)
        if isinstance(record, StepCommitted) and record.generation == entry.state.world_generation:
            member = _member_of(record, hosts_per_slice)
            committed[member] = max(committed.get(member, -1), record.step)
    return committed


def _member_of(record: StepCommitted, hosts_per_slice: int) -> int:
    return member_of(HostId(record.slice_index, record.host_index), hosts_per_slice)
