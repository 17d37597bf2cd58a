"""Real faults of every family, one after the other in jobs whose result is exact: nothing is lost or left.

A draw of each family (of the seed in ELASTIC_FAULT_SEED, 0 by default) runs with `make test-real`, all of it
with `make test-all`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from fault_jobs import assert_survived, run_with
from real_runs import Run

from elastic.records import LossDetected, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("ELASTIC_FAULT_SEED", "0"))
SLICES = 3
BOUND_S = 600.0
PHASES = ("FENCING", "PLANNING", "RESTORING", "REBUILDING", "REPLAYING")
EVERY_SLICE = [pytest.param(index, marks=pytest.mark.soak) for index in range(SLICES)]


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final state of an undisturbed run."""
    run = run_with(tmp_path_factory.mktemp("calm"), [])
    assert run.status == 0, run.output
    return run.report.final.state_digest


def victims(seed: object) -> list[int]:
    """The slices in an order of the seed's choice."""
    return random.Random(f"{SEED}/{seed}").sample(range(SLICES), SLICES)


def in_rounds(*faults: str) -> list[str]:
    """These faults, each once the world is whole again after the one before."""
    return [f"{fault},round={number}" for number, fault in enumerate(faults, 1)]


def struck(run: Run) -> list[tuple[int, ...]]:
    """The slices that each recovery lost, of those that lost any."""
    return [recovery.lost_slices for recovery in run.report.recoveries if recovery.lost_slices]


@pytest.mark.parametrize("first", [None, *EVERY_SLICE])
@pytest.mark.family("fault matrix")
def test_workers_killed_stopped_and_told_to_leave_cost_nothing(
    tmp_path: Path, digest: str, first: int | None
) -> None:
    order = victims("worker") if first is None else [(first + step) % SLICES for step in range(SLICES)]
    kinds = ("kill", "stop", "term")
    faults = in_rounds(*(f"{kind}:slice={index}@step=2" for kind, index in zip(kinds, order, strict=True)))
    run = run_with(tmp_path, faults, timeout_s=BOUND_S)
    assert_survived(run, digest)
    assert struck(run) == [(index,) for index in order]
    detectors = {loss.slice_index: loss.detector for loss in of_kind(run.records, LossDetected)}
    assert [detectors[index] for index in order] == ["process-exit", "worker-stopped", "preemption-notice"]


@pytest.mark.parametrize("index", [None, *EVERY_SLICE])
@pytest.mark.family("agents")
def test_agents_killed_stopped_for_a_while_and_told_to_end_lose_nothing(
    tmp_path: Path, digest: str, index: int | None
) -> None:
    index = victims("agent")[0] if index is None else index
    faults = [
        f"kill:agent={index}@step=4,round=1",
        f"stop:agent={(index + 1) % SLICES}@step=30,round=1,heal=1",
        f"term:agent={(index + 2) % SLICES}@step=60,round=1",
    ]
    run = run_with(tmp_path, faults, timeout_s=BOUND_S)
    assert_survived(run, digest)


@pytest.mark.family("agents")
def test_agent_that_is_stopped_for_good_is_replaced_and_its_slice_comes_back(
    tmp_path: Path, digest: str
) -> None:
    index = victims("stopped agent")[0]
    run = run_with(tmp_path, [f"stop:agent={index}@step=4"], timeout_s=BOUND_S)
    assert_survived(run, digest)


@pytest.mark.parametrize(
    "fault",
    ["kill:service", *(pytest.param(f"{kind}:service", marks=pytest.mark.soak) for kind in ("term", "stop"))],
)
@pytest.mark.family("runtime service")
def test_runtime_service_takes_no_snapshot_along(tmp_path: Path, digest: str, fault: str) -> None:
    run = run_with(tmp_path, [f"{fault}@step=4"], timeout_s=BOUND_S)
    assert_survived(run, digest)


@pytest.mark.parametrize(
    "kind", ["kill", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("stop", "term"))]
)
@pytest.mark.family("fault matrix")
def test_two_at_once_then_a_host_then_all(tmp_path: Path, digest: str, kind: str) -> None:
    one, other, third = victims("several")
    faults = in_rounds(
        f"{kind}:slice={one}+{other}@step=2", f"host:slice={third}@step=2", f"{kind}:slice=0+1+2@step=2"
    )
    assert_survived(run_with(tmp_path, faults, timeout_s=BOUND_S), digest)


@pytest.mark.parametrize(
    "kind", ["kill", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("stop", "term", "host"))]
)
@pytest.mark.family("second loss")
def test_second_fault_in_each_phase_of_the_recovery_of_the_first(
    tmp_path: Path, digest: str, kind: str
) -> None:
    faults = []
    for number, phase in enumerate(PHASES, 1):
        one, other, _ = victims(phase)
        faults += [
            f"kill:slice={one}@step=2,round={number}",
            f"{kind}:slice={other}@phase={phase},round={number}",
        ]
    assert_survived(run_with(tmp_path, faults, timeout_s=BOUND_S), digest)


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.family("fault matrix")
def test_slice_that_flaps_and_dies_while_joining_fails_no_job(
    tmp_path: Path, digest: str, times: int
) -> None:
    index = victims("flapping")[0]
    kills = in_rounds(*[f"kill:slice={index}@step=1"] * times)
    faults = [*kills, f"kill:slice={index}@phase=JOINING,round=1"]
    run = run_with(tmp_path, faults, "--quarantine-s", "0.02", timeout_s=BOUND_S)
    assert_survived(run, digest)
    assert [record.slice_index for record in run.report.quarantines] == [index] * len(run.report.quarantines)
