"""An agent's process of a shadow group: memory first; what it says; what ends it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elastic import agent_shadow
from elastic.agent_shadow import ShadowRunner
from elastic.job import JobSpec
from elastic.shadow_events import EndShadow, ShadowTold, StartShadow
from elastic.state import Config
from elastic.worker_process import WorkerExit

GIB = 1 << 30


@pytest.fixture
def told() -> list[ShadowTold]:
    return []


@pytest.fixture
def runner(tmp_path: Path, told: list[ShadowTold]) -> ShadowRunner:
    spec = JobSpec(
        job_id="shadow", directory=tmp_path, adapter="multicontroller", in_place="proven",
        simulated_faults=False, command=(sys.executable, "-c", "import time; time.sleep(60)"),
        service_command=(), config=Config(num_slices=2), shm_root=tmp_path,
    )  # fmt: skip
    exits: list[WorkerExit] = []
    return ShadowRunner(spec, 1, told.append, exits.append)


def memory(monkeypatch: pytest.MonkeyPatch, available: int, used: int) -> None:
    monkeypatch.setattr(
        agent_shadow, "_field_bytes", lambda path, name: available if name == "MemAvailable" else used
    )


def test_process_is_not_started_where_memory_is_short(
    runner: ShadowRunner, told: list[ShadowTold], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, 3 * GIB, 2 * GIB)
    runner.obey(StartShadow(member=1, number=4), os.getpid())
    (said,) = told
    assert (said.member, said.number, said.state) == (1, 4, "skipped")
    assert said.detail == "3072 MiB of memory are available, 4096 MiB would be wanted"


def test_process_that_ends_by_itself_is_told_and_one_that_is_ended_not(
    runner: ShadowRunner, told: list[ShadowTold], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, 8 * GIB, GIB)
    runner.obey(StartShadow(member=1, number=1), os.getpid())
    standby = runner._standby
    assert standby is not None
    assert runner.ended(WorkerExit(pid=standby.process.pid, status=-9))
    standby.end(wait=True)
    assert [(said.number, said.state) for said in told] == [(1, "failed")]
    runner.obey(StartShadow(member=1, number=2), os.getpid())
    later = runner._standby
    assert later is not None
    runner.obey(EndShadow(member=1, number=1), None)
    assert not later.process.wait_exit(0.0)
    runner.obey(EndShadow(member=1, number=2), None)
    assert later.process.wait_exit(10.0)
    assert not runner.ended(WorkerExit(pid=later.process.pid, status=-9))
    assert len(told) == 1


def test_worker_that_is_not_there_wants_no_memory() -> None:
    assert agent_shadow.lack_of_memory(None, 4) == ""
