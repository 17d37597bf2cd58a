"""The journal keeps the newest records, and skips what is torn."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshot_helpers import flip

from reshard.errors import CorruptCopyError, UsageError
from snapshot.journal import Journal, JournalReader, JournalRecord, allocate_journal, record_bytes
from snapshot.reserve import reserve_journal
from snapshot.shm import PAGE_BYTES

NUM_IDS = 5


def record(step: int, generation: int = 1) -> JournalRecord:
    return JournalRecord(
        step=step,
        generation=generation,
        position=step * NUM_IDS,
        sample_ids=tuple(range(step * NUM_IDS, (step + 1) * NUM_IDS)),
        iterator_state=f"state {step}".encode(),
    )


def new_journal(root: Path, num_records: int = 4) -> Journal:
    allocate_journal(root / "journal", record_bytes=record_bytes(NUM_IDS, 20), num_records=num_records)
    return Journal(root / "journal")


def read(root: Path) -> tuple[JournalRecord, ...]:
    reader = JournalReader(root / "journal")
    records = reader.records()
    reader.close()
    return records


def test_journal_gives_back_what_was_appended_while_it_is_open(root: Path) -> None:
    journal = new_journal(root)
    assert read(root) == ()
    journal.append(record(1))
    journal.append(record(2))
    assert read(root) == (record(1), record(2))
    journal.close()


@given(num_appended=st.integers(0, 30), num_records=st.integers(1, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ring_keeps_the_newest_records_in_order(root: Path, num_appended: int, num_records: int) -> None:
    journal = new_journal(root, num_records)
    for step in range(num_appended):
        journal.append(record(step))
    journal.close()
    kept = range(max(0, num_appended - num_records), num_appended)
    assert read(root) == tuple(record(step) for step in kept)


def test_another_worker_appends_after_the_newest_record(root: Path) -> None:
    first = new_journal(root)
    for step in range(6):
        first.append(record(step))
    first.close()
    second = Journal(root / "journal")
    second.append(record(6, generation=2))
    second.close()
    assert [item.step for item in read(root)] == [3, 4, 5, 6]


def test_since_gives_the_newest_record_of_each_later_step(root: Path) -> None:
    journal = new_journal(root, 8)
    for step in (1, 2, 3):
        journal.append(record(step))
    journal.append(record(2, generation=2))
    journal.close()
    reader = JournalReader(root / "journal")
    assert reader.since(1) == (record(2, generation=2), record(3))
    assert reader.since(3) == ()
    reader.close()


def test_record_with_any_byte_flipped_is_skipped_and_the_others_kept(root: Path) -> None:
    journal = new_journal(root)
    for step in range(3):
        journal.append(record(step))
    used = 56 + 8 * NUM_IDS + len(record(1).iterator_state)
    start = PAGE_BYTES + 2 * journal.record_bytes  # sequence 2: the record of step 1
    journal.close()
    for offset in range(start, start + used):
        flip(root / "journal", offset)
        assert read(root) == (record(0), record(2)), f"byte {offset - start} went unnoticed"
        flip(root / "journal", offset)
    assert len(read(root)) == 3


def test_journal_header_damage_is_refused(root: Path) -> None:
    new_journal(root).close()
    for offset in range(40):
        flip(root / "journal", offset)
        with pytest.raises(CorruptCopyError, match=r"foreign file|future version|header|truncated"):
            read(root)
        flip(root / "journal", offset)
    (root / "journal").write_bytes((root / "journal").read_bytes()[: PAGE_BYTES + 100])
    with pytest.raises(CorruptCopyError, match="truncated"):
        read(root)


def test_record_too_large_is_refused_and_the_journal_unharmed(root: Path) -> None:
    journal = new_journal(root)
    journal.append(record(1))
    big = JournalRecord(step=2, generation=1, position=0, sample_ids=range(1000))
    with pytest.raises(UsageError, match=r"step 2 needs 8056 bytes"):
        journal.append(big)
    journal.close()
    assert read(root) == (record(1),)


def test_larger_reservation_keeps_the_records(root: Path) -> None:
    journal = new_journal(root)
    for step in range(6):
        journal.append(record(step))
    journal.close()
    before = read(root)
    reserve_journal(root / "journal", 1024, 16)
    assert read(root) == before
    reader = JournalReader(root / "journal")
    assert (reader.record_bytes, reader.num_records) == (1024, 16)
    reader.close()


def test_find_returns_the_newest_entry_of_a_step_in_its_own_generation(root: Path) -> None:
    journal = new_journal(root)
    for generation in (1, 2):
        for step in range(3):
            journal.append(replace(record(step), generation=generation, position=10 * generation))
    journal.append(replace(record(1), generation=2, position=99))
    journal.close()
    reader = JournalReader(root / "journal")
    found = reader.find(1, 2)
    assert found is not None
    assert (found.step, found.generation, found.position) == (1, 2, 99)
    assert reader.find(1, 3) is None
    assert reader.find(7, 2) is None
    reader.close()


def test_finding_one_step_after_another_does_not_search_a_long_journal(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_records = 512
    journal = new_journal(root, num_records)
    reads = 0
    pread = os.pread

    def counted(fd: int, num_bytes: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        return pread(fd, num_bytes, offset)

    reader = JournalReader(root / "journal")
    monkeypatch.setattr(os, "pread", counted)
    for step in range(2 * num_records):
        journal.append(record(step))
        assert reader.find(step, 1) == record(step)
    journal.close()
    reader.close()
    assert reads < num_records + 3 * 2 * num_records  # searched once at most
