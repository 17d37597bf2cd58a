"""The agent: the sidecar of one host. It owns the arena, starts and watches the worker, serves
and fetches shards.

One thread decides; readers of the worker's socket, the coordinator's stream and the worker's pidfd only
put things in its queue. Run as `python -m elastic.agent DIR MEMBER`. A new agent re-adopts the arena and
the worker that an earlier one left behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from elastic.agent_beat import Beat
from elastic.agent_buddies import AgentPull, BuddyKeeper
from elastic.agent_own_digest import OwnDigest
from elastic.agent_persist import Persister
from elastic.agent_prepare import Preparer
from elastic.agent_said import Said
from elastic.agent_shadow import ShadowRunner, lack_of_memory, num_hosts_here
from elastic.agent_standby import StandbyProcess, WarmWorker
from elastic.agent_stream import STALE, CoordinatorStream, StreamLost
from elastic.agent_tasks import ArenaTasks, Verified
from elastic.agent_untold import has_untold, untold_commits
from elastic.events import (
    AgentAttached,
    Assign,
    AuditAfter,
    Captured,
    ComputeDigest,
    DigestDone,
    EndWorker,
    Fence,
    Fenced,
    Finished,
    FinishPersist,
    LaidOut,
    LeftWorld,
    Peers,
    Persisted,
    PersistSettled,
    PreemptionNotice,
    Rebuilt,
    ResetHost,
    SharePersisted,
    Shutdown,
    StacksTaken,
    Stage,
    Staged,
    StagePersisted,
    StartWorker,
    StepFailed,
    StopAfter,
    TakeStacks,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
    WorkerState,
    WorldSpec,
)
from elastic.job import ROLE_WARM, JobSpec, load_job, load_token
from elastic.join_events import HostPrepared, PrepareHost
from elastic.leash import watch_leash
from elastic.protocol import (
    CommitsKept,
    EnterWorld,
    Heartbeat,
    Hello,
    JobEnded,
    LoopEnded,
    Rehearse,
    Rehearsed,
    Replicated,
    Reserve,
    Reserved,
    StateDescribed,
    StepTold,
    TakeTurn,
    Unwound,
    WorkerCommitted,
    WorldRebuilt,
)
from elastic.refusals import RefusalTally
from elastic.shadow_events import EndShadow, EnterShadow, StartShadow
from elastic.solo_worlds import sizes_ahead, solo_world
from elastic.wire import FramedSocket
from elastic.worker_process import (
    PID_FILE,
    REHEARSAL_EXIT_STATUS,
    WorkerExit,
    WorkerProcess,
    describe_end,
    start_time,
    write_pid,
)
from elastic.worker_socket import WorkerSocket
from reshard.errors import ElasticError, InsufficientMemoryError
from snapshot.arena import Arena
from snapshot.dataplane import DataPlaneServer

LIFE_EVERY_S = 2.0
"""How often the worker hears that its agent lives; well below its lease."""
FAILED_GRACE_S = 1.0
"""How long a worker may go on after the job has failed."""
LOOK_EVERY_S = 0.1
"""How often the worker's process is looked at; what ends it is told by the kernel at once."""
REHEARSE_S = 18.0
"""How long a worker that others do not wait for may rehearse before its turn, from its start: until somebody
would say that its script does not come to its session."""
ADOPT_S = 2.0
"""How long a new agent waits for the worker of an earlier one to connect, before it attaches."""


class LeashCut:
    """The launcher is gone."""


class Agent:
    """The sidecar of host number `member`; `run` returns when the job is over."""

    def __init__(self, spec: JobSpec, token: str, member: int) -> None:
        self._spec = spec
        self._member = member
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arena = Arena.create(spec.job_id, spec.config.host(member), root=spec.shm_root)
        self.generation = 0
        self._worker: WorkerProcess | None = None
        self._worker_state = WorkerState.NONE
        self._connection: FramedSocket | None = None
        self._heard_s = time.monotonic()
        self._heard_unix_s = time.time()
        self._stopped_since_s: float | None = None
        self._fence_pending = False
        self._ending: str = ""
        self._lost_cause = ""
        """Why there is no worker, if it was lost."""
        self._failure_told = False
        self._refused = RefusalTally()
        self._server = DataPlaneServer(
            self._arena,
            token,
            lambda: self.generation,
            bind_host=spec.bind_host_of(member),
            tls=spec.tls,
            on_refused=partial(self._refused.count, "data-plane"),
        )
        self._server.start()
        self._tasks = ArenaTasks(
            self._arena,
            member,
            token,
            tls=spec.tls,
            persist_root=spec.persist_root,
            count_writes=spec.config.count_writes,
            hosts_per_slice=spec.config.hosts_per_slice,
        )
        self._own_digest = OwnDigest(member, spec.config.host(member))
        self._persister: Persister | None = None
        if spec.persist is not None:
            replicas = spec.config.replicas
            self._persister = Persister(
                spec.persist, spec.job_id, member, replicas, self._arena, self._inbox.put
            )
        self._pull = AgentPull(token, spec.tls, spec.config.hosts_per_slice)
        host, replicas = spec.config.host(member), spec.config.replicas
        self._buddies = BuddyKeeper(self._arena, host, replicas, self._pull, self._inbox.put)
        self._buddies.start()
        self._room = Preparer(self._arena, member, replicas, self._inbox.put)
        self._socket = WorkerSocket(spec.socket_path(member), self._inbox.put, self._refused)
        self._warm = WarmWorker(
            spec, member, self._arena.directory, self._inbox.put, worlds=self._worlds_ahead
        )
        self._world_size = spec.config.num_slices
        """How many slices the newest world has that this host took part in."""
        self._rehearse_until_s: float | None = None
        """Until then the worker that starts may rehearse before its turn."""
        self._was_warm = False
        """Whether the worker stood by at its session before it was wanted."""
        self._shadow = ShadowRunner(spec, member, self._send, self._inbox.put)
        count_stale = partial(self._refused.count, "control", STALE)
        self._stream = CoordinatorStream(spec, token, member, self._inbox.put, count_stale)
        self._over = False
        self._said = Said()
        self._end_by_s: float | None = None
        self._beat = Beat(self._send_beat, spec.heartbeat_s, spec.agent_stuck_s)
        self._next_life_s = 0.0

    # ---- life ----

    def run(self) -> int:
        """Serve until the job is over; returns the exit status."""
        watch_leash(lambda: self._inbox.put(LeashCut()))
        signal.signal(signal.SIGTERM, lambda *_: self._inbox.put(LeashCut()))
        self._adopt()
        self._attach()
        self._beat.start()
        while not self._over:
            self._beat.turned()
            try:
                item = self._inbox.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                item = None
            if item is not None:
                self._take(item)
            self._look_after()
        self._close()
        return 0

    def _adopt(self) -> None:
        """Find the worker that an earlier agent of this host left behind."""
        try:
            left = msgspec.json.decode((self._arena.directory / PID_FILE).read_bytes(), type=dict[str, int])
        except (OSError, msgspec.MsgspecError):
            return
        if start_time(left["pid"]) != left["start_time"]:
            return
        self._worker = WorkerProcess.adopt(left["pid"], self._inbox.put)
        # Whether it is in a world it says itself when it connects; it tries for `lease_s`.
        deadline_s = time.monotonic() + ADOPT_S
        heard: list[Any] = []
        while self._worker is not None and self._connection is None and time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Empty):
                item = self._inbox.get(timeout=0.1)
                if isinstance(item, tuple) and not isinstance(item[1], Hello):
                    heard.append(item)  # for after we have attached
                else:
                    self._take(item)
        for item in heard:
            self._inbox.put(item)

    def _attach(self) -> None:
        self._stream.attach(
            self.generation,
            AgentAttached(
                member=self._member,
                worker=self._worker_state,
                worker_pid=self._worker.pid if self._worker else 0,
                generation=self.generation,
                data_address=self._server.address,
                agent_pid=os.getpid(),
                lost_cause=self._lost_cause,
            ),
        )
        for event in self._said.again(self.generation):
            self._stream.send(self.generation, event)

    def _send(self, event: Any) -> None:
        self._said.note(event)
        self._stream.send(self.generation, event)

    def _send_beat(self) -> None:
        self._stream.send(self.generation, Heartbeat(unix_s=time.time()))

    def _to_worker(self, message: Any) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # its end is noticed through the pidfd
                self._connection.send(message)

    def _close(self) -> None:
        self._beat.close()
        self._warm.close()
        self._shadow.end(wait=True)
        self._buddies.close()
        if self._persister is not None:
            self._persister.cancel()
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait_exit(2.0)
        self._socket.close()
        self._server.close()
        (self._arena.directory / PID_FILE).unlink(missing_ok=True)
        self._arena.unlink()
        self._stream.close()

    # ---- one thing at a time ----

    def _take(self, item: Any) -> None:
        if isinstance(item, WorkerExit):
            self._worker_ended(item)
        elif isinstance(item, LeashCut):
            self._over = True
        elif isinstance(item, StreamLost):
            self._shadow.end()  # the next coordinator knows nothing of it
            self._attach()
        elif isinstance(item, Verified):
            self._verified(item)
        elif isinstance(item, Replicated):
            self._to_worker(item)
        elif isinstance(item, Staged | DigestDone | SharePersisted | Persisted | HostPrepared):
            self._send(item)
        elif isinstance(item, tuple):
            self._hear_worker(*item)
        else:
            self._obey(item)

    def _look_after(self) -> None:
        now_s = time.monotonic()
        if self._end_by_s is not None and now_s >= self._end_by_s:
            self._over = True
        if now_s >= self._next_life_s:
            self._next_life_s = now_s + LIFE_EVERY_S
            self._shadow.look_after()
            if self._worker is not None:
                self._worker.memory.look()
            self._to_worker(Heartbeat(unix_s=time.time()))
            for told in self._refused.take() if self._stream.is_attached else ():
                self._stream.send(self.generation, told)
        if self._rehearse_until_s is not None and now_s >= self._rehearse_until_s:
            self._give_turn()
        if not self._stream.job_ended and (self._stream.is_elsewhere() or self._stream.is_mute()):
            self._attach()  # where packets are lost without a word, the old connection is tried for minutes
        if self._worker is None or self._ending or self._stream.job_ended:
            return
        if self._stream.is_silent_for(self._spec.lease_s):
            # The coordinator may count this slice as lost by now: stop, before somebody else goes on
            # without it.
            self._end_worker("its agent has heard nothing from the coordinator for its lease", "lease")
            return
        if not self._worker.is_stopped():
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now_s
        elif now_s - self._stopped_since_s >= self._spec.worker_stopped_s:
            self._end_worker("it was stopped (SIGSTOP) and is out of reach", "worker-stopped")
            return
        if self._connection is not None and now_s - self._heard_s > self._spec.worker_silent_s:
            self._end_worker("it has sent no heartbeat", "worker-heartbeat")

    def _end_worker(self, cause: str, detector: str) -> None:
        """End a worker that hangs, and say so at once: what it shared with others is broken from now on."""
        assert self._worker is not None
        self._ending = cause
        self._lost_cause = f"the worker was ended: {cause}"
        self._worker.kill()
        self._send(
            WorkerLost(
                member=self._member,
                pid=self._worker.pid,
                cause=self._lost_cause,
                detector=detector,
                last_life_unix_s=self._heard_unix_s,
            )
        )

    def _worker_ended(self, exit_: WorkerExit) -> None:
        if self._warm.ended(exit_) or self._shadow.ended(exit_):
            return  # nothing but a process less to fall back on
        if self._worker is None or self._worker.pid != exit_.pid:
            return
        told, told_failure = self._ending, self._failure_told
        state, evidence = self._worker_state, self._worker.memory.evidence()
        did_rehearse = self._rehearse_until_s is not None and self._connection is not None
        if exit_.status == REHEARSAL_EXIT_STATUS or (did_rehearse and exit_.signal_name != "SIGKILL"):
            # The next one does not.
            self._warm.rehearsed(Rehearsed(error=str(exit_)))
        self._forget_worker()
        if self._stream.job_ended:
            self._over = True
        elif told:
            pass  # we ended it, and have said so
        elif exit_.is_loss or did_rehearse:
            self._lost_cause = str(exit_)
            self._send(
                WorkerLost(
                    member=self._member,
                    pid=exit_.pid,
                    cause=f"{exit_} ({evidence})" if evidence else str(exit_),
                    detector="process-exit",
                    aborted=exit_.status == -signal.SIGABRT,
                    killed_by=exit_.signal_name,
                    evidence=evidence,
                    last_life_unix_s=time.time(),
                )
            )
        elif not told_failure:
            log = self._spec.worker_file(self._member, "log")
            error = f"{describe_end(exit_, state)}; its output is in {log}"
            self._send(WorkerFailed(member=self._member, error=error))
        if self._fence_pending:
            self._report_fenced()

    def _forget_worker(self) -> None:
        self._worker = None
        self._worker_state = WorkerState.NONE
        self._rehearse_until_s = None
        self._ending = ""
        self._failure_told = False
        self._stopped_since_s = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        (self._arena.directory / PID_FILE).unlink(missing_ok=True)

    # ---- the worker speaks ----

    def _hear_worker(self, connection: FramedSocket, message: Any) -> None:
        if isinstance(message, Hello):
            self._meet(connection, message)
            return
        if connection is not self._connection:
            if not self._warm.hear(connection, message):
                self._shadow.hear(connection, message)
            return
        self._heard_s, self._heard_unix_s = time.monotonic(), time.time()
        if isinstance(message, WorkerCommitted):
            record = self._tasks.committed_record(message)
            self._send(StepTold(record=record, checksums=message.checksums))
            if message.checksums:
                self._captured(message.generation, message.step)
            self._warm.committed()
        elif isinstance(message, Reserve):
            self._to_worker(self._reserve(message))
        elif isinstance(message, Rehearsed):
            self._warm.rehearsed(message)
            self._give_turn()
        elif isinstance(message, Unwound):
            self._worker_state = WorkerState.READY
            if self._fence_pending and message.generation >= self.generation:
                self._report_fenced()
        elif isinstance(message, WorldRebuilt):
            self._rebuilt(message)
        elif isinstance(message, LoopEnded):
            if self._persister is not None:
                self._persister.loop_ended()
            self._send(
                Finished(
                    member=self._member,
                    generation=message.generation,
                    step=message.step,
                    snapshots=self._tasks.snapshots(),  # the digest verifies what it reads
                )
            )
        elif isinstance(message, LaidOut | Captured):
            self._send(message)
            if isinstance(message, Captured) and not message.is_audit:
                self._captured(message.generation, message.step)
        elif isinstance(message, StateDescribed):
            if self._persister is not None:
                self._persister.describe(message.tree)
        elif isinstance(message, WorkerFailed | StepFailed | StacksTaken | LeftWorld | PreemptionNotice):
            self._failure_told = self._failure_told or isinstance(message, WorkerFailed)
            self._send(message)

    def _captured(self, generation: int, step: int) -> None:
        self._buddies.captured(generation, step)
        if self._persister is not None:
            self._persister.captured(generation, step)

    def _meet(self, connection: FramedSocket, hello: Hello, *, warm: StandbyProcess | None = None) -> None:
        if self._warm.meet(connection, hello) or self._shadow.meet(connection, hello):
            return
        if self._worker is None or hello.pid != self._worker.pid:
            self._socket.refuse(connection, "unknown-sender", hello.pid)  # a stale incarnation, or a stranger
            return
        self._connection = connection
        self._worker.memory.look()  # by now it is in the control group that limits it
        self._heard_s, self._heard_unix_s = time.monotonic(), time.time()
        if hello.generation:
            self._worker_state = WorkerState.IN_WORLD
            self.generation = max(self.generation, hello.generation)
            self._buddies.captured_before(hello.generation)
            return
        self._was_warm = warm is not None
        if self._rehearse_until_s is None:
            self._is_ready()
        elif not (warm and warm.is_rehearsing):
            if worlds := self._warm.worlds():
                self._to_worker(Rehearse(worlds=worlds))
            else:
                self._give_turn()

    def _give_turn(self) -> None:
        """The worker that starts is not to rehearse any longer."""
        if self._rehearse_until_s is not None:
            self._rehearse_until_s = None
            if self._connection is not None:
                self._is_ready()

    def _is_ready(self) -> None:
        assert self._worker is not None
        self._worker_state = WorkerState.READY
        self._to_worker(TakeTurn())  # one that stood by waits for it
        if self._stream.is_attached:
            self._send(WorkerReady(member=self._member, pid=self._worker.pid, was_warm=self._was_warm))

    def _reserve(self, wanted: Reserve) -> Reserved:
        try:
            self._room.reserve(wanted.slot_bytes, wanted.journal_record_bytes, wanted.journal_records)
            if wanted.buddy_bytes:
                self._buddies.reserve(wanted.buddy_bytes)
        except InsufficientMemoryError as error:
            return Reserved(
                error=str(error),
                needed_bytes=int(str(error.fields.get("needed_bytes", 0))),
                available_bytes=int(str(error.fields.get("available_bytes", 0))),
            )
        except (ElasticError, OSError) as error:
            return Reserved(error=str(error))
        return Reserved()

    def _rebuilt(self, message: WorldRebuilt) -> None:
        snapshot = None
        if message.restored_step is not None:
            snapshot = self._tasks.summary_of(message.restored_step, message.generation)
        self._send(
            Rebuilt(
                member=self._member,
                generation=message.generation,
                snapshot=snapshot,
                form_s=message.form_s,
                restore_s=message.restore_s,
                bytes_from=self._tasks.bytes_from(message.bytes_from),
            )
        )
        if snapshot is not None and (wanted := self._own_digest.restored(snapshot)) is not None:
            self._tasks.compute_digest(wanted, self._inbox.put)

    def _report_fenced(self) -> None:
        """Verify what this host holds and report; large states take a while, and life goes on meanwhile."""
        self._fence_pending = False
        self._tasks.verify(self.generation, self._inbox.put)

    def _verified(self, verified: Verified) -> None:
        if verified.generation == self.generation and not self._fence_pending:
            if has_untold(verified.snapshots, self._said.newest_commit):
                for commit in untold_commits(self._arena, self._said.newest_commit):
                    self._send(StepTold(record=self._tasks.committed_record(commit), is_found=True))
            self._send(
                Fenced(
                    member=self._member,
                    generation=self.generation,
                    worker=self._worker_state,
                    snapshots=verified.snapshots,
                    rejected=verified.rejected,
                )
            )

    # ---- the coordinator commands ----

    def _obey(self, command: Any) -> None:
        if isinstance(command, Fence):
            self._fence(command)
        elif isinstance(command, StartWorker):
            self._start_worker(is_awaited=command.is_awaited)
        elif isinstance(command, EndWorker):
            self._end_quietly(command.why)
        elif isinstance(command, Assign):
            self._worker_state = WorkerState.IN_WORLD
            self._said.forget()  # the fencing and the fetching before this world are over
            if not command.world.rehearsal:
                self._world_size = len(command.world.slices)
            self._own_digest.entered(command.world)
            self._to_worker(EnterWorld(world=command.world))
        elif isinstance(command, Peers):
            self._pull.addresses = command.addresses
        elif isinstance(command, StopAfter | AuditAfter | TakeStacks):
            self._to_worker(command)
        elif isinstance(command, PrepareHost):
            self._room.prepare(command)
        elif isinstance(command, Stage):
            self._tasks.stage(command, lambda: self.generation, self._inbox.put)
        elif isinstance(command, StagePersisted):
            self._tasks.stage_persisted(command, lambda: self.generation, self._inbox.put)
        elif isinstance(command, CommitsKept):
            self._said.kept(command)
        elif isinstance(command, PersistSettled):
            self._said.settled(command)
            if self._persister is not None:
                self._persister.settled(command)
        elif isinstance(command, FinishPersist):
            if self._persister is not None:
                self._persister.finish(command)
        elif isinstance(command, ComputeDigest) and not self._own_digest.is_begun(command):
            self._tasks.compute_digest(command, self._inbox.put)
        elif isinstance(command, ResetHost):
            self._end_quietly("its slice had been given up")
            self._attach()
        elif isinstance(command, StartShadow | EnterShadow | EndShadow):
            self._shadow.obey(command, self._worker.pid if self._worker else None)
        elif isinstance(command, Shutdown):
            self._shut_down(command.completed)

    def _fence(self, command: Fence) -> None:
        if command.generation < self.generation:
            return
        self.generation = command.generation
        self._give_turn()
        self._buddies.leave()
        if self._persister is not None:
            self._persister.cancel()
        self._said.forget()  # of a world that is over
        self._shadow.end()
        self._warm.recovering(has_worker=self._worker is not None)
        self._fence_pending = True
        if command.leave_out:
            self._end_quietly("told to leave")
        elif self._worker_state is WorkerState.IN_WORLD and self._worker is not None and not self._ending:
            self._to_worker(command)
        elif self._worker is None or self._worker_state is not WorkerState.IN_WORLD:
            self._report_fenced()

    def _start_worker(self, *, is_awaited: bool) -> None:
        if self._worker is not None:
            self._end_quietly("another takes its place")
        self._said.forget_worker()
        self._lost_cause = ""
        warm = self._warm.take()
        may_rehearse = not is_awaited and not (warm and warm.has_rehearsed) and bool(self._warm.worlds())
        self._rehearse_until_s = time.monotonic() + REHEARSE_S if may_rehearse else None
        role = ROLE_WARM if may_rehearse else ""
        self._worker = (
            warm.process
            if warm
            else WorkerProcess.start(self._spec, self._member, self._inbox.put, role=role)
        )
        self._worker_state = WorkerState.STARTING
        self._heard_s = time.monotonic()
        write_pid(self._arena.directory / PID_FILE, self._worker.pid)
        if warm is not None:
            warm.go_on()
            if warm.connection is not None:
                self._meet(warm.connection, Hello(pid=warm.process.pid, generation=0), warm=warm)

    def _worlds_ahead(self) -> tuple[WorldSpec, ...]:
        """What a process that stands by is to play alone."""
        config = self._spec.config
        worker_pid = self._worker.pid if self._worker else None
        if not config.plays_alone or lack_of_memory(worker_pid, num_hosts_here(self._spec)):
            return ()
        generation = max(self.generation, 1)  # 0 is no world
        sizes = sizes_ahead(config, self._world_size)
        return tuple(solo_world(config, size, generation) for size in sizes)

    def _end_quietly(self, why: str) -> None:
        """End the worker because we were told so: that is no loss to report."""
        if self._worker is not None:
            self._ending = why
            self._worker.kill()
            self._worker.wait_exit(5.0)
            self._forget_worker()
        if self._fence_pending:
            self._report_fenced()

    def _shut_down(self, completed: bool) -> None:
        """Let the worker end: after a completed job it may take its time (a last save), after a failed
        one not.
        """
        self._to_worker(JobEnded(completed=completed))
        self._over = self._worker is None or self._worker_state is WorkerState.STARTING
        if not completed:
            self._end_by_s = time.monotonic() + FAILED_GRACE_S


def main() -> int:
    """Run the agent of a host."""
    directory, member = Path(sys.argv[1]), int(sys.argv[2])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    return Agent(load_job(directory), load_token(directory), member).run()


if __name__ == "__main__":
    sys.exit(main())
