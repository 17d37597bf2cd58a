"""Files written by every released version stay readable; these were written by version 1."""

from __future__ import annotations

from pathlib import Path

from snapshot_helpers import shard_data, small_static

from snapshot.journal import JournalReader, JournalRecord
from snapshot.slot_reader import SlotReader

DATA = Path(__file__).parent / "data"


def test_slot_of_version_1_is_readable() -> None:
    with SlotReader(DATA / "slot_v1.bin") as reader:
        manifest = reader.read_manifest()
        assert manifest is not None
        assert (manifest.step, manifest.generation, manifest.position) == (7, 1, 70)
        assert manifest.static == small_static()
        shards = [reader.read_shard(index).tobytes() for index in range(3)]
    assert shards == shard_data(small_static(), 7)
    assert manifest.checksums == (8938457249934192892, 3244421341483603138, 3567218563105181598)


def test_journal_of_version_1_is_readable() -> None:
    reader = JournalReader(DATA / "journal_v1.bin")
    expected = JournalRecord(step=1, generation=1, position=8, sample_ids=(3, 1, 2), iterator_state=b"state")
    assert reader.records() == (expected,)
    reader.close()
