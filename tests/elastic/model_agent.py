"""The agent of a modelled host: obeys the coordinator while it is connected."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from model_state import PATHS, Content
from model_worker import Snapshot

from elastic.agent_said import Said
from elastic.events import (
    AgentAttached,
    Assign,
    Committed,
    ComputeDigest,
    DigestDone,
    EndWorker,
    Event,
    Fence,
    Fenced,
    FinishPersist,
    Persisted,
    PersistSettled,
    ResetHost,
    SharePersisted,
    Shutdown,
    SnapshotSummary,
    StacksTaken,
    Stage,
    Staged,
    StagePersisted,
    StartWorker,
    StopAfter,
    TakeStacks,
    WorkerLost,
    WorkerState,
)
from elastic.join_events import HostPrepared, PrepareHost
from elastic.shadow_events import EndShadow, EnterShadow, ShadowTold, StartShadow
from reshard.holdings import Holding

if TYPE_CHECKING:
    from model_host import Host


class Agent:
    """The sidecar of a host: obeys the coordinator while it is connected."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.job = host.job
        self.alive = True
        self.generation = 0
        self.fence_pending = False
        self.unsettled: int | None = None
        self.said = Said()
        self.commits: list[Committed] = []
        self.finishing: set[tuple[int, int]] = set()
        self.pid = self.job.next_agent_pid()
        self.shadow = 0
        """The shadow group that this host has a process in."""
        self._up_s = 0.0
        self._down_s = 0.0

    @property
    def index(self) -> int:
        return self.host.index

    def _in_order(self, last_s: float) -> float:
        return max(self.job.now_s + self.job.jitter_s(), last_s + 1e-6)

    def attach(self) -> None:
        """Tell the coordinator what there is, and what the worker said last."""
        worker = self.host.worker
        event = AgentAttached(
            member=self.index,
            worker=worker.state if worker else WorkerState.NONE,
            worker_pid=worker.pid if worker else 0,
            generation=self.generation,
            data_address=f"host:{self.index}",
            agent_pid=self.pid,
        )
        if self.job.is_down:
            return
        self._send(lambda: self.job.attach(self, event))
        words = [*self.commits, *self.said.again(self.generation)]
        words += [word for word in (worker.last_words if worker else ()) if word not in words]
        for word in words:
            self._tell(word)

    def tell(self, event: Event) -> None:
        """Send an event, in order; the coordinator hears it unless it has given this agent up."""
        self.said.note(event)
        if isinstance(event, Committed):
            self.commits.append(event)
        self._tell(event)

    def _tell(self, event: Event) -> None:

        def arrive() -> None:
            if self.host.attached is self:
                self.job.tell(event)

        self._send(arrive)

    def _send(self, arrive: Callable[[], None]) -> None:
        if not self.alive or self.host.cut:
            return
        self._up_s = self._in_order(self._up_s)
        self.job.after(self._up_s - self.job.now_s, arrive)

    def break_stream(self, noticed_s: float) -> None:
        """The coordinator notices after a while, and after all that was sent before."""
        last_life_s = self.job.now_s
        self._up_s = max(self._up_s, self.job.now_s + noticed_s) + 1e-6
        self.job.after(self._up_s - self.job.now_s, lambda: self.job.detach(self.index, self, last_life_s))

    def receive_later(self, command: Any) -> None:
        """A command is under way to this agent."""
        self._down_s = self._in_order(self._down_s)

        def arrive() -> None:
            if self.alive and not self.host.cut:
                self._obey(command)

        self.job.after(self._down_s - self.job.now_s, arrive)

    def _obey(self, command: Any) -> None:
        worker = self.host.worker
        if isinstance(command, StartWorker):
            self.said.forget_worker()
            self.host.start_worker()
        elif isinstance(command, EndWorker):
            self._end_quietly()
        elif isinstance(command, Fence):
            self._fence(command)
        elif isinstance(command, TakeStacks):
            if worker is not None and not self.host.is_deaf:
                generation, hangs = command.generation, worker.hangs and not worker.waits
                self.tell(StacksTaken(member=self.index, generation=generation, in_script=hangs, where="f"))
        elif isinstance(command, StopAfter):
            if worker is not None and worker.spec and worker.spec.generation == command.generation:
                worker.stop_after = command.step
        elif isinstance(command, PrepareHost):
            took_s = self.job.random.uniform(0.01, 0.3)
            self.job.after(took_s, lambda: self.tell(HostPrepared(member=self.index)))
        elif isinstance(command, Stage):
            self.job.after(self.job.random.uniform(0.005, 0.05), lambda: self._stage(command))
        elif isinstance(command, StagePersisted):
            self.job.after(self.job.random.uniform(0.005, 0.05), lambda: self._stage_persisted(command))
        elif isinstance(command, PersistSettled):
            self.said.settled(command)
            is_ours = (self.generation, self.unsettled) == (command.generation, command.step)
            self.unsettled = None if is_ours else self.unsettled
        elif isinstance(command, FinishPersist):
            self.job.after(self.job.finish_s, lambda: self._finish_persist(command))
        elif isinstance(command, Assign):
            self.said.forget()
            self.commits.clear()
            if worker is not None and worker.state is WorkerState.READY:
                worker.enter(command.world)
        elif isinstance(command, ComputeDigest):
            self.job.after(self.job.random.uniform(*self.job.digest_s), lambda: self._digest(command))
        elif isinstance(command, ResetHost):
            self._end_quietly()
            self.attach()
        elif isinstance(command, StartShadow | EnterShadow | EndShadow):
            self._shadow(command)
        elif isinstance(command, Shutdown):
            self._end_quietly()
            self.host.is_released = True

    def _shadow(self, command: StartShadow | EnterShadow | EndShadow) -> None:
        """A process of a shadow group: it gets to its session, makes its step; it may fail."""
        if isinstance(command, EndShadow):
            self.shadow = 0 if command.number == self.shadow else self.shadow
            return
        starts = isinstance(command, StartShadow)
        self.shadow = command.number if starts else self.shadow
        fails = self.job.shadow_fails and self.job.random.random() < self.job.shadow_fails

        def tell() -> None:
            if self.alive and self.shadow == command.number:
                state: Any = "failed" if fails else "ready" if starts else "done"
                self.tell(ShadowTold(member=self.index, number=command.number, state=state, detail="x"))

        self.job.after(self.job.random.uniform(0.1, 0.5), tell)

    def _end_quietly(self) -> None:
        if self.host.worker is not None:
            self.host.worker.end()
        if self.fence_pending:
            self._report()

    def _fence(self, command: Fence) -> None:
        if command.generation < self.generation:
            return
        self.generation, self.fence_pending = command.generation, True
        self.said.forget()
        self.shadow = 0
        self.unsettled = None
        worker = self.host.worker
        if worker is not None:
            worker.hear_fence(keeps_runtime=command.keep_runtime)
        if command.leave_out:
            self._end_quietly()
        elif worker is not None and worker.state is WorkerState.IN_WORLD:
            worker.leave()
        else:
            self._report()

    def heard_unwound(self) -> None:
        if self.fence_pending:
            self._report()

    def worker_ended(self, pid: int, cause: str) -> None:
        self.tell(
            WorkerLost(
                member=self.index,
                pid=pid,
                cause=cause,
                detector="process-exit",
                last_life_unix_s=0.0,
                killed_by="SIGKILL" if "SIGKILL" in cause else "",
                evidence=self.job.kernel_says,
            )
        )
        if self.fence_pending:
            self._report()

    def _report(self) -> None:
        self.fence_pending = False
        worker = self.host.worker
        self.tell(
            Fenced(
                member=self.index,
                generation=self.generation,
                worker=worker.state if worker else WorkerState.NONE,
                snapshots=self.host.summaries(),
            )
        )

    def _stage(self, command: Stage) -> None:
        if not self.alive or command.generation != self.generation:
            return
        error, contents, holdings = "", set[Content](), []
        for transfer in command.transfers:
            source = self.job.host(transfer.source)
            content = source.serve(command.step, command.of_generation)
            if content is None:
                error = f"{transfer.source} has no step {command.step}"
                break
            contents.add(content)
            holdings.append(
                Holding(
                    host=self.job.config.host(self.index),
                    step=command.step,
                    path=transfer.path,
                    box=transfer.piece,
                    checksum=0,
                    tier="shm",
                )
            )
        self.host.stage = None
        if command.transfers and not error:
            (content,) = contents
            summary = SnapshotSummary(
                step=command.step,
                generation=command.generation,
                layout=command.layout,
                holdings=tuple(holdings),
            )
            self.host.stage = Snapshot(command.step, command.generation, content, summary, complete=True)
        self.tell(Staged(member=self.index, generation=command.generation, error=error))

    # ---- the persistent tier ----

    def write_share(self, snapshot: Snapshot) -> None:
        """The worker has captured a step that is due: this host's share of it takes a while to write."""

        if self.unsettled is not None:
            self.tell(
                SharePersisted(
                    member=self.index,
                    generation=snapshot.generation,
                    step=snapshot.step,
                    error=f"step {self.unsettled} was still being written",
                    left_out=True,
                )
            )
            return
        self.unsettled = snapshot.step

        def written() -> None:
            if not self.alive or snapshot.generation != self.generation or self.index in self.job.stuck_hosts:
                return
            error = "" if self.job.disk_works else "the disk is full"
            if not error:
                shares = self.job.shares.setdefault((snapshot.step, snapshot.generation), {})
                shares[self.index] = snapshot.content
            self.tell(
                SharePersisted(
                    member=self.index,
                    generation=snapshot.generation,
                    step=snapshot.step,
                    error=error,
                )
            )

        self.job.after(self.job.random.uniform(*self.job.share_s), written)

    def _finish_persist(self, command: FinishPersist) -> None:
        if not self.alive:
            return
        if (command.step, command.generation) in self.finishing:
            return
        self.finishing.add((command.step, command.generation))
        shares = self.job.shares[command.step, command.generation]
        (content,) = set(shares.values())
        self.job.disk[command.step] = command.generation, content
        self.tell(
            Persisted(
                member=self.index,
                generation=command.generation,
                step=command.step,
                snapshot=self.job.persisted_summary(command.step),
            )
        )

    def _stage_persisted(self, command: StagePersisted) -> None:
        if not self.alive or command.generation != self.generation:
            return
        assert {path for path, _ in command.boxes} == set(PATHS)
        summary = SnapshotSummary(
            step=command.step,
            generation=command.generation,
            layout=command.layout,
            holdings=tuple(
                Holding(
                    host=self.job.config.host(self.index),
                    step=command.step,
                    path=path,
                    box=box,
                    checksum=0,
                    tier="shm",
                )
                for path, box in command.boxes
            ),
        )
        error = "bad checksum" if command.step in self.job.unreadable else ""
        if not error:
            content = self.job.disk[command.step][1]
            self.host.stage = Snapshot(command.step, command.generation, content, summary, complete=True)
        self.tell(Staged(member=self.index, generation=command.generation, error=error))

    def _digest(self, command: ComputeDigest) -> None:
        if not self.alive:
            return
        contents = {
            self.job.host(transfer.source).serve(command.step, command.of_generation)
            for transfer in command.transfers
        }
        if command.is_persisted:
            contents = {self.job.disk[command.step][1]}
        digest = "" if None in contents else str(hash(next(iter(contents))))
        assert len(contents) == 1 or not digest
        self.tell(
            DigestDone(
                member=self.index,
                generation=command.generation,
                step=command.step,
                purpose=command.purpose,
                digest=digest,
            )
        )
