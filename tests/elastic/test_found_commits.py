"""What a coordinator makes of commits that an agent found in its host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.coordinator import Coordinator
from elastic.events import Phase
from elastic.job import HISTORY_FILE, JobSpec
from elastic.protocol import StepTold
from elastic.records import MessageRefused, StepCommitted, of_kind, read_history
from elastic.state import Config

WORLD = 3


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """One that fences the world of generation 3, which has committed step 5 on slice 0."""
    spec = JobSpec(
        job_id="test",
        directory=tmp_path,
        adapter="multicontroller",
        in_place="proven",
        simulated_faults=False,
        command=("true",),
        service_command=(),
        config=Config(num_slices=2),
    )
    made = Coordinator(spec, "right")
    state = made._state
    made._state = replace(
        state,
        phase=Phase.FENCING,
        generation=WORLD + 1,
        world=(0, 1),
        world_generation=WORLD,
        newest_committed=5,
        started=True,
    )
    made._take(0, told(5, is_found=False))
    yield made
    made.close()


def told(step: int, *, generation: int = WORLD, is_found: bool = True, member: int = 0) -> StepTold:
    record = StepCommitted(
        unix_s=1.0,
        generation=generation,
        slice_index=member,
        step=step,
        position=2 * step,
        sample_ids=(2 * step, 2 * step + 1),
        loss=None,
        step_s=0.0,
        stall_s=0.0,
        captured_bytes=0,
    )
    return StepTold(record=record, is_found=is_found)


def written(directory: Path) -> tuple[list[tuple[int, int, int]], int]:
    records = list(read_history(directory / HISTORY_FILE))
    commits = of_kind(records, StepCommitted)
    refused = len(of_kind(records, MessageRefused))
    return [(one.slice_index, one.generation, one.step) for one in commits], refused


def test_found_commit_that_nobody_told_of_is_in_the_history_and_counts(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    coordinator._take(0, told(6))
    assert written(tmp_path) == ([(0, WORLD, 5), (0, WORLD, 6)], 0)
    assert coordinator._state.newest_committed == 6


def test_found_commit_that_was_told_before_is_not_written_again(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    coordinator._take(0, told(4))
    coordinator._take(0, told(5))
    assert written(tmp_path) == ([(0, WORLD, 5)], 0)


def test_found_commit_of_an_older_world_is_passed_over_without_a_refusal(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    coordinator._take(1, told(9, generation=WORLD - 1, member=1))
    assert written(tmp_path) == ([(0, WORLD, 5)], 0)
    assert coordinator._state.newest_committed == 5
