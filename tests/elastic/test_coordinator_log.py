"""What a coordinator writes down, and what the next one makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.arbiter import FencedError
from elastic.coordinator_log import CoordinatorLog, LogDamagedError
from elastic.events import Phase
from elastic.job import HISTORY_FILE, LOG_DIRECTORY
from elastic.records import PhaseEntered, StepCommitted, encode_record, of_kind, read_history
from elastic.runtime_service import ServiceRecord
from elastic.state import Config, JobState, initial_state

SERVICE = ServiceRecord(generation=4, pid=17, start_time=99)


def phase(name: str, unix_s: float = 1.0) -> PhaseEntered:
    return PhaseEntered(unix_s=unix_s, generation=4, phase=name)


def commit(step: int, slice_index: int = 0, generation: int = 4) -> StepCommitted:
    return StepCommitted(
        unix_s=step, generation=generation, slice_index=slice_index, step=step, position=0, sample_ids=(),
        loss=None, step_s=0.1, stall_s=0.0, captured_bytes=1,
    )  # fmt: skip


def running() -> JobState:
    state = initial_state(Config(num_slices=2), 0.0)
    return replace(state, phase=Phase.RUNNING, generation=4, world_generation=4, world=(0, 1))


Open = Callable[..., CoordinatorLog]


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Open]:
    made: list[CoordinatorLog] = []

    def build(epoch: int = 1, check: Callable[[], None] = lambda: None) -> CoordinatorLog:
        made.append(CoordinatorLog(tmp_path, epoch, check))
        return made[-1]

    yield build
    for log in made:
        log.close()


def test_first_coordinator_finds_nothing(tmp_path: Path, open_log: Open) -> None:
    assert open_log().take_over() is None


def test_records_of_a_turn_that_was_cut_off_are_written_by_the_next_one_once(
    tmp_path: Path, open_log: Open
) -> None:
    first = open_log()
    first.write(phase("FENCING"))
    turn = [phase("PLANNING"), phase("RUNNING")]
    first.ahead(running(), 0.0, turn, (SERVICE,))
    first.write(turn[0])  # and dies
    second = open_log(2)
    entry = second.take_over()
    assert entry is not None
    assert entry.services == (SERVICE,)
    assert entry.state.phase is Phase.RUNNING
    history = list(read_history(tmp_path / HISTORY_FILE))
    assert [record.phase for record in of_kind(history, PhaseEntered)] == ["FENCING", "PLANNING", "RUNNING"]


def test_commits_after_the_entry_are_known_from_the_history(tmp_path: Path, open_log: Open) -> None:
    first = open_log()
    assert first.note_commit(commit(5), 4)
    first.ahead(running(), 0.0, [], ())
    for step in (6, 7):
        assert first.note_commit(commit(step), 4)
    assert first.note_commit(commit(6, slice_index=1), 4)
    second = open_log(2)
    entry = second.take_over()
    assert entry is not None
    assert entry.state.newest_committed == 7
    assert second.committed == {0: 7, 1: 6}
    assert not second.note_commit(commit(7), 4)
    assert second.note_commit(commit(7, slice_index=1), 4)
    assert not second.note_commit(commit(8, generation=3), 4)


def test_commits_are_counted_by_host_where_a_slice_has_several(tmp_path: Path) -> None:
    first = CoordinatorLog(tmp_path, 1, lambda: None, hosts_per_slice=2)
    first.ahead(running(), 0.0, [], ())
    for host in (0, 1):
        assert first.note_commit(replace(commit(5, slice_index=1), host_index=host), 4)
    first.close()
    second = CoordinatorLog(tmp_path, 2, lambda: None, hosts_per_slice=2)
    assert second.take_over() is not None
    assert second.committed == {2: 5, 3: 5}
    assert not second.note_commit(replace(commit(5, slice_index=1), host_index=1), 4)
    assert second.note_commit(replace(commit(6, slice_index=1), host_index=1), 4)
    second.close()


def test_torn_last_record_is_cut_off_and_the_history_goes_on(tmp_path: Path, open_log: Open) -> None:
    first = open_log()
    first.ahead(running(), 0.0, [], ())
    first.write(phase("RUNNING"))
    with (tmp_path / HISTORY_FILE).open("ab") as file:
        file.write(encode_record(phase("FENCING"))[:-9])
    second = open_log(2)
    assert second.take_over() is not None
    second.write(phase("PLANNING"))
    history = of_kind(list(read_history(tmp_path / HISTORY_FILE)), PhaseEntered)
    assert [record.phase for record in history] == ["RUNNING", "PLANNING"]


def test_stale_coordinator_changes_no_entry_of_a_later_one(tmp_path: Path, open_log: Open) -> None:
    stale, fresh = open_log(), open_log(2)
    fresh.ahead(running(), 0.0, [], ())
    stale.ahead(initial_state(Config(num_slices=2), 0.0), 0.0, [], ())
    entry = open_log(3).take_over()
    assert entry is not None
    assert entry.state.generation == 4


def test_coordinator_that_is_fenced_writes_nothing(tmp_path: Path, open_log: Open) -> None:
    def check() -> None:
        if fenced:
            raise FencedError("over")

    fenced: list[int] = []
    log = open_log(1, check)
    log.write(phase("RUNNING"))
    fenced.append(1)
    with pytest.raises(FencedError):
        log.write(phase("FENCING"))
    with pytest.raises(FencedError):
        log.ahead(running(), 0.0, [], ())
    assert len(list(read_history(tmp_path / HISTORY_FILE))) == 1
    assert list((tmp_path / LOG_DIRECTORY).iterdir()) == []


def test_state_that_changed_in_nothing_durable_is_not_written_again(tmp_path: Path, open_log: Open) -> None:
    log = open_log()
    log.ahead(running(), 0.0, [], ())
    path = tmp_path / LOG_DIRECTORY / "state-1"
    written = path.stat().st_ino
    log.ahead(replace(running(), newest_committed=9), 1.0, [], ())
    assert path.stat().st_ino == written
    log.ahead(replace(running(), generation=5), 2.0, [], ())
    assert path.stat().st_ino != written


def test_damaged_entry_is_told_and_not_passed_over(tmp_path: Path, open_log: Open) -> None:
    log = open_log()
    (tmp_path / LOG_DIRECTORY / "state-1").write_bytes(b"\xff\x00")
    with pytest.raises(LogDamagedError, match="state-1 cannot be read"):
        log.take_over()
