"""The coordinator dies or hangs in the middle of training, or of a recovery: nothing is lost.

These need a coordinator that is started again (`CoordinatorStarted` in the history); without one the run ends
with its coordinator, and they are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_jobs import assert_survived, run_with

from elastic import records
from elastic.records import of_kind

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not hasattr(records, "CoordinatorStarted"), reason="a coordinator that died is not started again"
    ),
]

BOUND_S = 600.0
PHASES = ("FENCING", "PLANNING", "RESTORING", "REBUILDING", "REPLAYING")


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final state of an undisturbed run."""
    run = run_with(tmp_path_factory.mktemp("calm"), [])
    assert run.status == 0, run.output
    return run.report.final.state_digest


@pytest.mark.parametrize(
    "fault",
    [
        "kill:coordinator@step=4",
        pytest.param("term:coordinator@step=4", marks=pytest.mark.soak),
        pytest.param("stop:coordinator@step=4,heal=3", marks=pytest.mark.soak),
    ],
)
@pytest.mark.family("coordinator killed")
def test_coordinator_struck_while_steps_run_costs_no_step_and_no_world(
    tmp_path: Path, digest: str, fault: str
) -> None:
    run = run_with(tmp_path, [fault], timeout_s=BOUND_S)
    assert_survived(run, digest)
    assert of_kind(run.records, records.LossDetected) == []


@pytest.mark.parametrize(
    "phases", [("RESTORING",), pytest.param(PHASES, marks=pytest.mark.soak)], ids=["one", "all"]
)
@pytest.mark.family("coordinator killed")
def test_coordinator_killed_in_a_phase_of_a_recovery(
    tmp_path: Path, digest: str, phases: tuple[str, ...]
) -> None:
    faults = []
    for number, phase in enumerate(phases, 1):
        index = number % 3
        faults += [
            f"kill:slice={index}@step=2,round={number}",
            f"kill:coordinator@phase={phase},round={number}",
        ]
    assert_survived(run_with(tmp_path, faults, timeout_s=BOUND_S), digest)


@pytest.mark.soak
def test_coordinator_killed_together_with_a_worker_an_agent_and_its_service(
    tmp_path: Path, digest: str
) -> None:
    faults = [
        *("kill:coordinator@step=4,round=1", "kill:slice=1@step=4,round=1"),
        *("kill:coordinator@step=4,round=2", "kill:agent=2@step=4,round=2", "kill:slice=0@step=10,round=2"),
        *("kill:coordinator@step=4,round=3", "kill:service@step=4,round=3"),
    ]
    assert_survived(run_with(tmp_path, faults, timeout_s=BOUND_S), digest)
