"""Layouts that do not take every slice, and scripts that ask for others than expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import model_host
import model_state
import model_worker
import pytest
from model_job import Job
from test_machine_single_events import after, state_when

from elastic.events import Fence, LaidOut, Phase
from elastic.records import WorldFormed, of_kind
from elastic.state import JobState
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A state on a mesh whose second axis takes two slices: it fits an even number of them."""

    def layout_for(slices: tuple[int, ...], hosts_per_slice: int = 1) -> Layout:
        mesh = MeshLayout(
            axis_names=("data", "expert"),
            axis_sizes=(len(slices) // 2, 2),
            hosts=tuple(HostId(index) for index in slices),
        )
        arrays = tuple(
            ArrayLayout(path=path, shape=(4,), dtype="float32", itemsize=4) for path in model_state.PATHS
        )
        return Layout(mesh=mesh, arrays=arrays, elastic_axis="data")

    monkeypatch.setattr(model_state, "layout_for", layout_for)
    monkeypatch.setattr(model_host, "layout_for", layout_for)
    monkeypatch.setattr(model_worker, "layout_for", layout_for)
    model_state.summary_of.cache_clear()
    yield
    model_state.summary_of.cache_clear()


@pytest.mark.usefixtures("pairs")
def test_slice_that_no_layout_takes_is_idle_until_another_one_is_there() -> None:
    job = Job(4, num_steps=40, rejoin_after_steps=5)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    first, shrunk, grown = job.formed
    assert (first.slices, shrunk.slices, grown.slices) == ((0, 1, 2, 3), (2, 3), (0, 1, 2, 3))
    assert (shrunk.lost, grown.joined) == ((1,), (0, 1))
    assert shrunk.explanation.endswith("; data=1 on 2 slices, slice 0 idle")
    assert grown.restored_step == grown.newest_committed  # at a boundary, without replay


@pytest.mark.usefixtures("pairs")
def test_idle_slice_takes_the_place_of_a_lost_one() -> None:
    job = Job(4, num_steps=40, rejoin_after_steps=None)
    job.when_step(5, lambda: job.kill_worker(1))
    job.when_step(12, lambda: job.kill_worker(3))
    job.run()
    job.assert_completed()
    assert [world.slices for world in job.formed] == [(0, 1, 2, 3), (2, 3), (0, 2)]


@pytest.mark.usefixtures("pairs")
def test_idle_slice_that_is_lost_and_comes_back_does_not_disturb_the_world() -> None:
    job = Job(4, num_steps=60, rejoin_after_steps=0)
    job.hosts[1].start_fails = 0
    job.when_step(5, lambda: job.kill_worker(1))
    job.when_step(5, lambda: setattr(job.hosts[1], "start_fails", 100))
    job.when_step(10, lambda: job.kill_worker(0))
    job.run()
    job.assert_completed()
    assert [world.slices for world in job.formed] == [(0, 1, 2, 3), (2, 3)]


@pytest.mark.usefixtures("pairs")
def test_fresh_world_has_no_slice_too_many_either() -> None:
    job = Job(4, num_steps=20, rejoin_after_steps=None)
    job.when_phase(Phase.REPLAYING, lambda: job.kill_worker(1))  # before the first step
    job.run()
    job.assert_completed()
    assert [(world.slices, world.restored_step) for world in job.formed] == [
        ((0, 1, 2, 3), None),
        ((2, 3), None),
    ]


@pytest.mark.usefixtures("pairs")
def test_too_few_slices_for_any_layout_are_waited_for() -> None:
    job = Job(2, num_steps=20, rejoin_after_steps=50)
    job.when_step(5, lambda: job.kill_worker(1))
    job.run()
    job.assert_completed()
    assert [world.slices for world in job.formed] == [(0, 1), (0, 1)]


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("min_slices", "lost", "error"),
    [
        (1, (1, 2, 3), "no layout for 1 slice: axis 'data' on 1 slice: 1 devices are not a multiple of 2"),
        (3, (1,), "data=1 on 2 slices, slice 0 idle; at least 3 slices are to take part"),
    ],
)
def test_job_without_a_layout_ends_and_says_why(min_slices: int, lost: tuple[int, ...], error: str) -> None:
    job = Job(4, min_slices=min_slices, rejoin_after_steps=None)
    job.when_step(5, lambda: job.kill_workers(*lost))
    job.run()
    assert job.outcome[0] == "failed"
    assert error in job.outcome[1]
    assert "was left in the hosts' memory" in job.outcome[1]


# ---- another layout than expected ----------------------------------------------------------------


def rebuilding() -> JobState:
    """Two of three slices put the state on their devices again."""
    found: list[JobState] = []
    job = Job(3, rejoin_after_steps=None)
    job.when_step(5, lambda: job.kill_worker(1))
    job.when_phase(Phase.REBUILDING, lambda: found.append(job.state), generation=2)
    job.run()
    assert (found[0].phase, found[0].world) == (Phase.REBUILDING, (0, 2))
    return found[0]


def asked(state: JobState, lacking: str) -> LaidOut:
    layout = model_state.layout_for(state.world)
    arrays = tuple(replace(array, spec=(("data",),)) for array in layout.arrays)
    layout = replace(layout, arrays=arrays)
    return LaidOut(member=2, generation=state.generation, layout=layout, lacking=lacking)


def test_script_that_asks_for_another_layout_gets_a_world_that_is_planned_for_it() -> None:
    state = rebuilding()
    event = asked(state, "[0:4] of weights")
    anew, commands = after(state, event, at_s=0.0)
    assert (anew.phase, anew.generation) == (Phase.FENCING, state.generation + 1)
    assert {command.member for command in commands if isinstance(command, Fence)} == {0, 1, 2}
    assert dict(anew.layouts)[2] == event.layout
    assert anew.copies.layout is None or anew.copies.layout != event.layout


def test_layout_of_a_state_that_is_there_changes_nothing_else() -> None:
    state = rebuilding()
    after_it, commands = after(state, asked(state, ""), at_s=0.0)
    assert (after_it.phase, commands) == (Phase.REBUILDING, [])


def test_script_whose_layout_is_never_the_one_planned_ends_the_job() -> None:
    state = replace(rebuilding(), stage_failures=3)
    ended, _ = after(state, asked(state, "[0:4] of weights"), at_s=0.0)
    assert ended.phase is Phase.FAILED
    assert ended.error == (
        "the restore failed 4 times in a row: slice 2 asks for another layout than was planned: "
        "[0:4] of weights"
    )


def test_layouts_are_remembered_by_the_number_of_slices_also_from_rehearsals() -> None:
    job = Job(3, rehearsals=1, rejoin_after_steps=None)
    job.when_step(5, lambda: job.kill_worker(0))
    job.run()
    job.assert_completed()
    assert [number for number, _ in job.state.layouts] == [2, 3]
    assert len(of_kind(job.history, WorldFormed)) == 3
    assert state_when(Phase.RUNNING).layouts[0][0] == 3
