"""The launcher: starts a job's coordinator and agents on this machine, keeps the agents running, and ends
everything.

In production the node's supervisor does the same with the agent of its host. Whatever the launcher
started ends with it: it holds the leash (see `elastic.leash`), and it is the reaper of what its children
leave behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import grpc
import msgspec
import tenacity

from elastic import control_pb2 as pb
from elastic.agent_standby import WARM_FILE
from elastic.control_channel import bearer, open_channel, read_place
from elastic.control_pb2_grpc import ControlStub
from elastic.coordinator_keeper import CoordinatorKeeper
from elastic.file_arbiter import FileArbiter
from elastic.job import COORDINATOR_FILE, ENV_LEASH_FD, HISTORY_FILE, LOG_DIRECTORY, JobSpec, save_job
from elastic.protocol import CONTROL_CODEC
from elastic.records import (
    FaultInjected,
    Record,
    RunEnded,
    ServiceStarted,
    StepCommitted,
    decode_record,
)
from elastic.worker_process import PID_FILE, is_stopped, start_time
from reshard.errors import ElasticError, JobFailedError
from snapshot.job import JobLock

_PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
MAX_ORPHANED = 16
"""How deep the processes below ours may be stacked that are ended with us."""
AGENT_STOPPED_S = 6.0
"""How long an agent may be stopped (SIGSTOP) before it is replaced: longer than its slice is waited for."""
STOP_GRACE_S = 2.0
FAILED_GRACE_S = 1.0


class Listener(Protocol):
    """Somebody who wants to hear the history of a run while it is written (a display, armed faults)."""

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        ...


class HistoryTail:
    """Reads the records that have been appended since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[Record]:
        """The new records, in order."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield decode_record(line)


class Launcher:
    """Runs one job; `run` returns its last record. Also what the chaos tooling aims at (`worker_pid`,
    `agent_pid`, `arena`).
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._lock = JobLock.acquire(spec.job_id, root=spec.shm_root)
        self._token = save_job(spec)
        self._leash_read, self._leash_write = os.pipe()
        for directory in (spec.arbiter_directory, spec.directory / LOG_DIRECTORY):
            _clear(directory)  # of an earlier job in this directory
        self._coordinator = CoordinatorKeeper(
            partial(self._spawn, "coordinator", "elastic.coordinator", str(spec.directory)),
            FileArbiter(spec.arbiter_directory),
            spec.directory / "logs" / "coordinator.log",
        )
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._service_pid: int | None = None
        self._stopped_since_s: dict[int, float] = {}
        self._interrupts = 0
        self._is_end_heard = False
        self._completed = False
        self._stop_by_s: float | None = None

    # ---- what the chaos tooling may aim at ----

    @property
    def hosts_per_slice(self) -> int:
        """How many hosts each slice has."""
        return self.spec.config.hosts_per_slice

    def worker_pid(self, member: int) -> int | None:
        """The process of a host's worker, also of one that is only just starting."""
        return _pid_in(self.arena(member) / PID_FILE)

    def agent_pid(self, member: int) -> int | None:
        """The process of a host's agent."""
        agent = self._agents.get(member)
        return agent.pid if agent is not None and agent.poll() is None else None

    def arena(self, member: int) -> Path:
        """The snapshot memory of a host."""
        return self.spec.host_directory(member)

    def note(self, fault: FaultInjected) -> None:
        """Have an injected fault written into the history, also while the coordinator is being replaced."""
        name, body = CONTROL_CODEC.encode(fault)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((grpc.RpcError, OSError)),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
            stop=tenacity.stop_after_delay(self.spec.lease_s),
            reraise=True,
        )
        retrying(self._call, "Note", pb.Envelope(member=-1, kind=name, body=body))

    def spare_pid(self, member: int) -> int | None:
        """The process of a host's warm spare."""
        return _pid_in(self.arena(member) / WARM_FILE)

    def coordinator_pid(self) -> int | None:
        """The process of the coordinator."""
        alive = [process for process in self._coordinator.processes() if process.poll() is None]
        return alive[-1].pid if alive else None

    def service_pid(self) -> int | None:
        """The process of the runtime service of the present world."""
        return self._service_pid

    # ---- the run ----

    def run(self, listeners: list[Listener]) -> RunEnded:
        """Start everything, keep it running, and return how the run ended. Raises JobFailedError when
        nobody wrote its end.
        """
        self._become_reaper()
        previous = {
            number: signal.signal(number, self._interrupted) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            self._start_all()
            return self._follow(listeners)
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start_all(self) -> None:
        (self.spec.directory / HISTORY_FILE).unlink(missing_ok=True)
        (self.spec.directory / COORDINATOR_FILE).unlink(missing_ok=True)
        self._coordinator.start()
        for index in range(self.spec.config.num_members):
            self._start_agent(index)

    def _start_agent(self, member: int) -> None:
        self._agents[member] = self._spawn(
            f"agent-{self.spec.config.label(member)}",
            "elastic.agent",
            str(self.spec.directory),
            str(member),
            prefix=self.spec.on_host(member),
        )

    def _spawn(
        self, name: str, module: str, *arguments: str, prefix: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        log_path = self.spec.directory / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {ENV_LEASH_FD: str(self._leash_read)}
        with log_path.open("ab") as log:
            return subprocess.Popen(
                [*prefix, sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=(self._leash_read,),
            )

    def _follow(self, listeners: list[Listener]) -> RunEnded:
        tail = HistoryTail(self.spec.directory / HISTORY_FILE)
        poll_s = min((getattr(listener, "poll_s", POLL_S) for listener in listeners), default=POLL_S)
        next_look_s = time.monotonic()
        while True:
            for record in tail.read():
                if isinstance(record, StepCommitted):
                    self._coordinator.note_step(record.step)
                if isinstance(record, ServiceStarted):
                    self._service_pid = record.pid or None
                for listener in listeners:
                    listener.feed(record)
                if isinstance(record, RunEnded):
                    self._is_end_heard = True
                    self._completed = record.outcome == "completed"
                    return record
            if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
                raise JobFailedError("interrupted", remedy="Everything it started was ended.")
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + POLL_S
                self._supervise()
            time.sleep(poll_s)

    def _supervise(self) -> None:
        """Start coordinator and agents again that have died: they go on from what was left behind. An agent
        that is stopped for long is ended: it would keep its host out of the job for good.
        """
        if self._stop_by_s is None:
            self._coordinator.look()
        now_s = time.monotonic()
        for index, agent in list(self._agents.items()):
            if not is_stopped(agent.pid):
                self._stopped_since_s.pop(index, None)
            elif now_s - self._stopped_since_s.setdefault(index, now_s) >= AGENT_STOPPED_S:
                agent.kill()
            if agent.poll() is not None and self._stop_by_s is None:
                self._start_agent(index)
        own = {child.pid for child in [*self._agents.values(), *self._coordinator.processes()]}
        for pid in _children() - own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._stop_by_s = time.monotonic()
            return
        self._stop_by_s = time.monotonic() + STOP_GRACE_S
        try:
            self._call("Stop", pb.StopRequest(reason=f"interrupted ({signal.Signals(number).name})"))
        except (grpc.RpcError, OSError, ElasticError):
            self._stop_by_s = time.monotonic()  # there is no coordinator yet, or none that could answer

    def _call(self, method: str, request: Any) -> Any:
        with open_channel(read_place(self.spec.directory), self.spec.tls) as channel:
            call = getattr(ControlStub(channel), method)
            return call(request, metadata=bearer(self._token), timeout=2.0)

    def _end_all(self) -> None:
        """Let what is ending end, then end the rest; nothing of the job is left behind."""
        started = [*self._agents.values(), *self._coordinator.processes()]
        # Where nobody has decided the end (no coordinator answers), nothing is ending by itself.
        bound_s = time.monotonic() + (FAILED_GRACE_S if self._is_end_heard else 0.0)
        while any(child.poll() is None for child in started):
            # After a completed run the scripts may still be at work (a last save); an interrupt ends that
            # too. An agent that was only just started when the coordinator ended never hears the end.
            if self._completed and not self._interrupts and self._is_script_at_work():
                bound_s = time.monotonic() + FAILED_GRACE_S
                if not self._coordinator.stay():
                    break  # the agents will not hear that the run is over
            elif time.monotonic() >= bound_s:
                break
            time.sleep(POLL_S)
        os.close(self._leash_write)
        bound_s = time.monotonic() + FAILED_GRACE_S
        for child in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(bound_s - time.monotonic(), 0.01))
            child.kill()
            child.wait()
        for _ in range(MAX_ORPHANED):
            if not (orphans := _children()):
                break
            for pid in orphans:  # what one of them leaves behind is a child of ours by the next turn
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        os.close(self._leash_read)
        self._lock.unlink()

    def _is_script_at_work(self) -> bool:
        return any(self.worker_pid(index) is not None for index in self._agents)

    @staticmethod
    def _become_reaper() -> None:
        """Have the workers of a dead agent become children of the launcher, so that none gets out of
        sight.
        """
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _clear(directory: Path) -> None:
    """Remove our files from a directory."""
    for pattern in ("epoch-*", "held-*", "part-*", "state-*"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def _pid_in(path: Path) -> int | None:
    """The process that an agent has written there, None when it has ended."""
    try:
        told = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return None
    return told["pid"] if start_time(told["pid"]) == told["start_time"] else None


def _children() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids.update(int(pid) for pid in (task / "children").read_text().split())
    return pids
