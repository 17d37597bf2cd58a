"""What the journal of a step binds a later world to."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from elastic.events import WorldSpec
from elastic.feed import StepJournal
from reshard.batch_sizes import NewSteps
from reshard.errors import InvariantBrokenError
from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.journal import JournalRecord

FULL, SMALL = np.arange(12), np.arange(8)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """A host that began step 5 in world 1, of three slices, where step 4 was the last to be committed."""
    root = Path(tempfile.mkdtemp(prefix="elastic-slices-test-", dir="/dev/shm"))
    arena = Arena.create("job", HostId(0), root=root)
    arena.reserve(4096, journal_record_bytes=512, journal_records=64)
    for step in (3, 4, 5):
        ids = FULL.tolist()
        arena.journal().append(JournalRecord(step=step, generation=1, position=0, sample_ids=ids))
    yield arena
    arena.unlink()
    shutil.rmtree(root)


def world(generation: int, *new_steps: tuple[int, int, int], rehearsal: bool = False) -> WorldSpec:
    worlds = [NewSteps(first_step=step, generation=made, num_slices=num) for step, made, num in new_steps]
    return WorldSpec(
        generation=generation,
        rank=0,
        slices=(0, 1),
        service_address="",
        restore_step=3,
        newest_committed=worlds[-1].first_step - 1,
        rehearsal=rehearsal,
        replicas=2,
        new_steps=tuple(worlds),
    )


def samples_in(arena: Arena, step: int) -> list[tuple[int, int]]:
    """Generation and number of samples of each record of a step."""
    reader = arena.journal_reader()
    found = [(r.generation, len(r.sample_ids)) for r in reader.records() if r.step == step]
    reader.close()
    return found


def test_step_that_was_committed_must_use_the_same_samples_again(arena: Arena) -> None:
    journal = StepJournal([arena], world(2, (0, 1, 3), (5, 2, 2)))
    with pytest.raises(InvariantBrokenError, match="step 4 used other samples before"):
        journal.write(4, SMALL, 56)
    journal.write(4, FULL, 60)
    assert samples_in(arena, 4) == [(1, 12), (2, 12)]


def test_step_that_only_began_may_use_others(arena: Arena) -> None:
    StepJournal([arena], world(2, (0, 1, 3), (5, 2, 2))).write(5, SMALL, 68)
    assert samples_in(arena, 5) == [(1, 12), (2, 8)]


def test_step_that_another_world_committed_later_is_not_bound_by_its_beginning(arena: Arena) -> None:
    """World 2 committed step 5 without this host, which still has the record of world 1."""
    journal = StepJournal([arena], world(3, (0, 1, 3), (5, 2, 2), (6, 3, 2)))
    journal.write(5, SMALL, 68)
    again = StepJournal([arena], world(4, (0, 1, 3), (5, 2, 2), (6, 3, 2), (7, 4, 1)))
    with pytest.raises(InvariantBrokenError, match="step 5 used other samples before"):
        again.write(5, FULL, 72)


def test_rehearsal_writes_nothing(arena: Arena) -> None:
    StepJournal([arena], world(2, (0, 1, 3), rehearsal=True)).write(4, SMALL, 8)
    assert samples_in(arena, 4) == [(1, 12)]
