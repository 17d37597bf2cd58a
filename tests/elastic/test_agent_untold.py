"""What an agent finds in its host's memory of steps that nobody was told of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agent_arenas import GENERATION, capture_step, layout_of_hosts, made_arenas

from elastic.agent_said import Said
from elastic.agent_tasks import ArenaTasks
from elastic.agent_untold import MAX_STEPS, has_untold, untold_commits
from elastic.protocol import StepTold
from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.journal import JournalRecord, record_bytes

LAYOUT = layout_of_hosts(2)
BATCH = 3
NEVER = (-1, -1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """A host whose worker has captured steps 3 and 4, and has written down what step 5 is to use."""
    with made_arenas(LAYOUT, 2, 3) as made:
        arena = made[HostId(0)]
        arena.reserve(4096, journal_record_bytes=record_bytes(BATCH), journal_records=128)
        for step in range(6):
            journal(arena, step, GENERATION)
        capture_step(arena, LAYOUT, 4, 2)
        yield arena


def journal(arena: Arena, step: int, generation: int) -> None:
    ids = tuple(range(BATCH * step, BATCH * (step + 1)))
    record = JournalRecord(step=step, generation=generation, position=BATCH * (step + 1), sample_ids=ids)
    arena.journal().append(record)


def steps(arena: Arena, told: tuple[int, int]) -> list[int]:
    return [commit.step for commit in untold_commits(arena, told)]


def test_untold_commits_are_those_after_the_last_word_up_to_the_captured_step(arena: Arena) -> None:
    assert steps(arena, (GENERATION, 2)) == [3, 4]
    assert {commit.generation for commit in untold_commits(arena, (GENERATION, 2))} == {GENERATION}


def test_untold_commits_are_none_once_the_captured_step_was_told(arena: Arena) -> None:
    assert steps(arena, (GENERATION, 4)) == []
    assert steps(arena, (GENERATION, 5)) == []
    assert steps(arena, (GENERATION + 1, 0)) == []


def test_untold_commits_of_a_new_agent_are_all_that_the_journal_has(arena: Arena) -> None:
    assert steps(arena, NEVER) == [0, 1, 2, 3, 4]


def test_untold_commits_leave_out_what_an_earlier_world_used(arena: Arena) -> None:
    for step in range(4):
        journal(arena, step, GENERATION - 1)
    assert steps(arena, (GENERATION - 1, 9)) == [0, 1, 2, 3, 4]


def test_untold_commits_are_bounded(arena: Arena) -> None:
    for step in range(6, 100):
        journal(arena, step, GENERATION)
    capture_step(arena, LAYOUT, 99, 2)
    assert steps(arena, NEVER) == list(range(100 - MAX_STEPS, 100))


def test_memory_is_worth_a_look_if_it_has_what_is_newer_than_the_last_word(arena: Arena) -> None:
    held = ArenaTasks(arena, 0).snapshots()
    assert has_untold(held, (GENERATION, 3))
    assert not has_untold(held, (GENERATION, 4))
    assert not has_untold((), NEVER)


def test_untold_commits_are_none_without_a_journal() -> None:
    with made_arenas(LAYOUT, 2, 3) as made:
        assert steps(made[HostId(0)], NEVER) == []


def test_record_of_an_untold_commit_has_the_samples_of_the_journal(arena: Arena) -> None:
    (commit,) = untold_commits(arena, (GENERATION, 3))
    record = ArenaTasks(arena, 0).committed_record(commit)
    assert (record.step, record.position, record.sample_ids) == (4, 12, (12, 13, 14))
    assert record.loss is None


def test_said_knows_the_newest_commit_after_the_coordinator_has_it(arena: Arena) -> None:
    said = Said()
    assert said.newest_commit == NEVER
    for commit in untold_commits(arena, NEVER):
        said.note(StepTold(record=ArenaTasks(arena, 0).committed_record(commit), is_found=True))
    assert said.newest_commit == (GENERATION, 4)
    assert steps(arena, said.newest_commit) == []
