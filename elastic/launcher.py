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
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import grpc
import msgspec

from elastic import control_pb2 as pb
from elastic.control_channel import bearer, open_channel, read_place
from elastic.control_pb2_grpc import ControlStub
from elastic.job import COORDINATOR_FILE, ENV_LEASH_FD, HISTORY_FILE, JobSpec, save_job
from elastic.members import member_of
from elastic.protocol import CONTROL_CODEC
from elastic.records import FaultInjected, Record, RunEnded, WorkerEvent, decode_record
from reshard.errors import ElasticError, JobFailedError
from reshard.ids import HostId
from snapshot.job import JobLock

_PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
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
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._worker_pids: dict[int, int] = {}
        self._interrupts = 0
        self._completed = False
        self._stop_by_s: float | None = None

    # ---- what the chaos tooling may aim at ----

    @property
    def hosts_per_slice(self) -> int:
        """How many hosts each slice has."""
        return self.spec.config.hosts_per_slice

    def worker_pid(self, member: int) -> int | None:
        """The process of a host's worker."""
        return self._worker_pids.get(member)

    def agent_pid(self, member: int) -> int | None:
        """The process of a host's agent."""
        agent = self._agents.get(member)
        return agent.pid if agent is not None and agent.poll() is None else None

    def arena(self, member: int) -> Path:
        """The snapshot memory of a host."""
        return self.spec.host_directory(member)

    def note(self, fault: FaultInjected) -> None:
        """Have an injected fault written into the history."""
        name, body = CONTROL_CODEC.encode(fault)
        self._call("Note", pb.Envelope(member=-1, kind=name, body=body))

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
        self._coordinator = self._spawn("coordinator", "elastic.coordinator", str(self.spec.directory))
        for index in range(self.spec.config.num_members):
            self._start_agent(index)

    def _start_agent(self, member: int) -> None:
        self._agents[member] = self._spawn(
            f"agent-{self.spec.config.label(member)}", "elastic.agent", str(self.spec.directory), str(member)
        )

    def _spawn(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        log_path = self.spec.directory / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {ENV_LEASH_FD: str(self._leash_read)}
        with log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=(self._leash_read,),
            )

    def _follow(self, listeners: list[Listener]) -> RunEnded:
        tail = HistoryTail(self.spec.directory / HISTORY_FILE)
        while True:
            for record in tail.read():
                if isinstance(record, WorkerEvent) and record.pid:
                    host = HostId(record.slice_index, record.host_index)
                    self._worker_pids[member_of(host, self.spec.config.hosts_per_slice)] = record.pid
                for listener in listeners:
                    listener.feed(record)
                if isinstance(record, RunEnded):
                    self._completed = record.outcome == "completed"
                    return record
            assert self._coordinator is not None
            status = self._coordinator.poll()
            if status is not None:
                raise JobFailedError(
                    f"the coordinator ended with status {status} before the run did",
                    remedy=f"See {self.spec.directory / 'logs' / 'coordinator.log'}.",
                )
            if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
                raise JobFailedError("interrupted", remedy="Everything it started was ended.")
            self._supervise()
            time.sleep(POLL_S)

    def _supervise(self) -> None:
        """Start agents again that have died: they re-adopt what they left behind."""
        for index, agent in list(self._agents.items()):
            if agent.poll() is not None and self._stop_by_s is None:
                self._start_agent(index)
        own = {child.pid for child in [*self._agents.values(), self._coordinator] if child is not None}
        for pid in _children() - own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._stop_by_s = time.monotonic()
            return
        self._stop_by_s = time.monotonic() + STOP_GRACE_S
        with contextlib.suppress(grpc.RpcError, OSError, ElasticError):
            self._call("Stop", pb.StopRequest(reason=f"interrupted ({signal.Signals(number).name})"))

    def _call(self, method: str, request: Any) -> Any:
        with open_channel(read_place(self.spec.directory), self.spec.tls) as channel:
            call = getattr(ControlStub(channel), method)
            return call(request, metadata=bearer(self._token), timeout=2.0)

    def _end_all(self) -> None:
        """Let what is ending end, then end the rest; nothing of the job is left behind."""
        started = [child for child in [*self._agents.values(), self._coordinator] if child is not None]
        bound_s = time.monotonic() + FAILED_GRACE_S
        while any(child.poll() is None for child in started):
            # After a completed run the scripts may still be at work (a last save); an interrupt ends that
            # too. An agent that was only just started when the coordinator ended never hears the end.
            if self._completed and not self._interrupts and self._is_script_at_work():
                bound_s = time.monotonic() + FAILED_GRACE_S
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
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os.close(self._leash_read)
        self._lock.unlink()

    def _is_script_at_work(self) -> bool:
        for index in self._agents:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                left = msgspec.json.decode(
                    (self.arena(index) / "worker.pid").read_bytes(), type=dict[str, int]
                )
                if Path(f"/proc/{left['pid']}").exists():
                    return True
        return False

    @staticmethod
    def _become_reaper() -> None:
        """Have the workers of a dead agent become children of the launcher, so that none gets out of
        sight.
        """
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids.update(int(pid) for pid in (task / "children").read_text().split())
    return pids
