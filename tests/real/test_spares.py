"""Warm processes, spare slices, programs compiled in the background, joiners that die: on real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_runs import BOUND_S, Run, assert_nothing_lost, finish, left_behind, processes_naming, start

from elastic import low_priority
from elastic.facts import WARM
from elastic.records import (
    PhaseEntered,
    Record,
    RunStarted,
    ShadowCompiled,
    StepCommitted,
    WorkerEvent,
    WorldFormed,
    of_kind,
    read_history,
)

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("tiny_loop.py")
GATE = 6
NO_GATE = 1 << 30
NO_END = 1 << 30
STEPS_AHEAD = 200
"""More steps than a job makes between two looks of a test."""


class Job:
    """A job that runs: its history so far, its processes, and the files that set its pace."""

    def __init__(self, directory: Path, *arguments: str, steps: int, gate: int = NO_GATE) -> None:
        self.directory = directory
        self.folder = directory / "pace"
        self.folder.mkdir(parents=True)
        command = ("--devices-per-host", "1", "--rehearsals", "0", "--out", str(directory), *arguments)
        script = (str(SCRIPT), str(self.folder), str(steps), str(gate))
        self.process = start(directory, "launch", *command, "--", *script)

    def records(self) -> list[Record]:
        path = self.directory / "events.jsonl"
        return list(read_history(path)) if path.exists() else []

    def wait(self, what: str, condition: Callable[[list[Record]], Any]) -> Any:
        deadline_s = time.monotonic() + BOUND_S
        while not (found := condition(self.records())):
            assert self.process.poll() is None, (
                f"the job ended before {what}: {self.process.communicate()[0]}"
            )
            assert time.monotonic() < deadline_s, f"not in time: {what}"
            self.hurry()
            time.sleep(0.05)
        return found

    def hurry(self) -> None:
        """Let what runs at low priority run as on a machine with nothing else to do."""
        for pid in processes_naming(str(self.directory)):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == pid and low_priority.is_lowered(pid):
                    low_priority.restore(pid)

    @property
    def memory(self) -> Path:
        (started,) = of_kind(self.records(), RunStarted)
        return Path("/dev/shm") / f"elastic-{started.run_id}"

    def pid(self, index: int, name: str) -> int:
        """The process of a slice that a file in its memory names; 0 if there is none."""
        try:
            found = msgspec.json.decode(
                (self.memory / f"s{index}h0" / name).read_bytes(), type=dict[str, int]
            )
        except FileNotFoundError:
            return 0
        return found["pid"]

    def num_connected(self, index: int) -> int:
        """How many processes are connected to the agent of a slice."""
        path = str(self.memory / f"s{index}h0" / "agent.sock")
        lines = Path("/proc/net/unix").read_text().splitlines()
        return sum(line.endswith(path) and line.split()[5] == "03" for line in lines)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def end(self) -> Run:
        return finish(self.process, self.directory)

    def end_soon(self) -> tuple[Run, int]:
        """Let it make some steps more; returns also how many it made in all."""
        last_step = max(record.step for record in of_kind(self.records(), StepCommitted)) + STEPS_AHEAD
        unfinished = self.folder / "enough.new"
        unfinished.write_text(str(last_step))
        unfinished.replace(self.folder / "enough")
        return self.end(), last_step + 1

    def kill(self, pid: int) -> None:
        if pid:
            os.kill(pid, signal.SIGKILL)


def worker_events(records: list[Record], index: int, state: str) -> list[WorkerEvent]:
    return [r for r in of_kind(records, WorkerEvent) if (r.slice_index, r.state) == (index, state)]


def assert_nothing_left(run: Run) -> None:
    assert left_behind(run.report.run.id) == []
    assert processes_naming(str(run.directory)) == []


@pytest.mark.family("warm processes")
def test_warm_process_and_precompiled_program_are_there_when_a_slice_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import real_runs

    monkeypatch.setattr(real_runs, "COMPILE_CACHE", tmp_path / "cache")  # a cold one
    fault = ("--fault", f"kill:slice=1@step={GATE + 4}")
    job = Job(tmp_path, "--slices", "2", "--rejoin-after-steps", "2", *fault, steps=NO_END, gate=GATE)
    job.wait("a program for one slice", lambda records: of_kind(records, ShadowCompiled))
    job.wait("warm processes", lambda _: job.num_connected(0) == job.num_connected(1) == 2)
    warm = [job.pid(index, "warm.pid") for index in (0, 1)]
    assert all(warm)
    job.touch("go")
    job.wait("the slice to join again", lambda records: len(of_kind(records, WorldFormed)) >= 3)
    run, num_steps = job.end_soon()
    assert_nothing_lost(run, steps=num_steps)
    (shadow,) = [record for record in of_kind(run.records, ShadowCompiled) if record.num_slices == 1]
    assert shadow.outcome == "compiled", shadow
    lost = of_kind(run.records, WorldFormed)[1]
    assert (lost.slices, lost.mode) == ((0,), "in-place")
    commits = [r for r in of_kind(run.records, StepCommitted) if r.generation == lost.generation]
    assert commits[0].cache_misses == 0
    assert commits[0].cache_hits >= 1
    ready = worker_events(run.records, 1, "ready")
    assert [(r.pid == warm[1], r.detail == WARM) for r in ready] == [(False, False), (True, True)]
    assert_nothing_left(run)


@pytest.mark.family("warm processes")
def test_warm_process_of_a_killed_agent_ends_and_is_no_loss(tmp_path: Path) -> None:
    job = Job(tmp_path, "--slices", "1", steps=NO_END, gate=GATE)
    job.wait("a warm process", lambda _: of_kind(job.records(), StepCommitted) and job.num_connected(0) == 2)
    warm, worker = job.pid(0, "warm.pid"), job.pid(0, "worker.pid")
    (agent,) = [
        pid
        for pid in processes_naming(str(tmp_path))
        if b"elastic.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(agent, signal.SIGKILL)
    job.wait("the warm process to end", lambda _: not Path(f"/proc/{warm}").exists())
    job.wait("the worker to be adopted", lambda records: worker_events(records, 0, "adopted"))
    assert job.pid(0, "worker.pid") == worker
    job.wait("another warm process", lambda _: job.num_connected(0) == 2)
    os.kill(job.pid(0, "warm.pid"), signal.SIGKILL)
    job.touch("go")
    run, num_steps = job.end_soon()
    assert (run.status, run.report.steps.committed) == (0, num_steps), run.output
    assert "broken" not in run.report.invariants.values()  # of copies nothing is known: there is one slice
    assert run.report.recoveries == ()
    assert_nothing_left(run)


def test_run_with_a_spare_is_bit_identical_to_one_without_the_fault(tmp_path: Path) -> None:
    plain = Job(tmp_path / "plain", "--slices", "3", "--no-warm", "--no-precompile", steps=40)
    plain.touch("enough")
    undisturbed = plain.end()
    assert_nothing_lost(undisturbed, steps=40)
    fault = ("--fault", "kill:slice=1@step=15", "--rejoin-after-steps", "never")
    options = ("--slices", "3", "--spares", "1", "--no-warm", "--no-precompile")
    job = Job(tmp_path / "spare", *options, *fault, steps=40, gate=GATE)
    job.wait("the spare", lambda records: worker_events(records, 3, "ready"))
    job.touch("go")
    run = job.end()
    assert_nothing_lost(run, steps=40)
    assert [world.slices for world in of_kind(run.records, WorldFormed)] == [(0, 1, 2), (0, 3, 2)]
    assert run.losses() == undisturbed.losses()
    assert run.report.final.state_digest == undisturbed.report.final.state_digest
    assert_nothing_left(run)


@pytest.mark.family("joiners")
def test_joiner_that_dies_while_joining_never_stops_the_others(tmp_path: Path) -> None:
    options = ("--slices", "2", "--rejoin-after-steps", "2", "--quarantine-s", "0", "--no-precompile")
    job = Job(tmp_path, *options, "--fault", "kill:slice=1@step=8", steps=NO_END)

    def after(last: int, is_it: Callable[[Record], bool]) -> Callable[[list[Record]], int]:
        """The place behind the next record of a kind; 0 while there is none."""
        return lambda records: next(
            (at + 1 for at, record in enumerate(records) if at >= last and is_it(record)), 0
        )

    def is_worker(state: str) -> Callable[[Record], bool]:
        return lambda r: isinstance(r, WorkerEvent) and (r.slice_index, r.state) == (1, state)

    def is_phase(phase: str) -> Callable[[Record], bool]:
        return lambda r: isinstance(r, PhaseEntered) and r.phase == phase

    def joins(record: Record) -> bool:
        return isinstance(record, WorldFormed) and record.joined == (1,)

    last = job.wait("the loss", after(0, is_worker("ended")))
    last = job.wait("a start", after(last, is_worker("started")))
    job.wait("its process", lambda _: job.pid(1, "worker.pid"))
    job.kill(job.pid(1, "worker.pid"))
    for moment in ("FENCING", "RESTORING", "REBUILDING"):
        last = job.wait("its end", after(last, is_worker("ended")))
        last = job.wait("a start", after(last, is_worker("ready")))
        if moment != "FENCING":
            last = job.wait("a world", after(last, joins))
        last = job.wait(moment, after(last, is_phase(moment)))
        job.kill(job.pid(1, "worker.pid"))
    last = job.wait("its end", after(last, is_worker("ended")))
    last = job.wait("a world", after(last, joins))
    job.wait("the world to train", after(last, is_phase("RUNNING")))
    run, num_steps = job.end_soon()
    assert_nothing_lost(run, steps=num_steps)
    assert_nothing_left(run)


def test_script_that_ends_without_a_session_is_told_at_once(tmp_path: Path) -> None:
    script = tmp_path / "forgot.py"
    script.write_text("print('trained')\n")
    process: subprocess.Popen[str] = start(
        tmp_path, "launch", "--slices", "1", "--out", str(tmp_path / "run"), "--", str(script)
    )
    run = finish(process, tmp_path / "run")
    assert run.status == 1
    assert "the script ended without calling elastic.session()" in run.output
