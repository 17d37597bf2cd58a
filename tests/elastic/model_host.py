"""The hosts of a modelled job: an agent that obeys, a worker that trains, an arena that outlives both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    Finished,
    LeftWorld,
    PreemptionNotice,
    Rebuilt,
    ResetHost,
    Shutdown,
    SnapshotSummary,
    Stage,
    Staged,
    StartWorker,
    StepFailed,
    StopAfter,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
    WorkerState,
    WorldSpec,
    host_of,
)
from reshard.holdings import Holding

if TYPE_CHECKING:
    from model_job import Job

Content = tuple[tuple[int, int], ...]
"""What a state is made of: each step it contains with the generation that made it."""


@dataclass(slots=True)
class Snapshot:
    """A slot of an arena: `complete` is its commit word."""

    step: int
    generation: int
    content: Content
    summary: SnapshotSummary
    complete: bool = False


@dataclass(slots=True)
class World:
    """The workers that have entered a world, and those that wait in its next collective."""

    spec: WorldSpec
    members: dict[int, Worker] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    broken: bool = False
    fails_next: bool = False


class Worker:
    """A training process."""

    def __init__(self, host: Host, pid: int) -> None:
        self.host = host
        self.job = host.job
        self.pid = pid
        self.alive = True
        self.state = WorkerState.STARTING
        self.spec: WorldSpec | None = None
        self.world: World | None = None
        self.content: Content = ()
        self.stop_after: int | None = None
        self.stuck = False
        self.busy_until_s = 0.0
        self.kept_slot: Snapshot | None = None
        self.last_words: list[Event] = []

    @property
    def index(self) -> int:
        return self.host.index

    def later(self, delay_s: float, action: Callable[[], None], world: World | None = None) -> None:
        """Do something later, unless the process has ended (or left that world) by then."""

        def act() -> None:
            if self.alive and (world is None or self.world is world):
                action()

        self.job.after(delay_s, act)

    def say(self, event: Event, *, again: bool = False) -> None:
        """Tell the agent; with `again`, also the next agent if this one is gone."""
        if again:
            self.last_words.append(event)
        if self.host.agent is not None:
            self.host.agent.tell(event)

    # ---- a world ----

    def enter(self, spec: WorldSpec) -> None:
        self.state, self.spec, self.stop_after, self.last_words = WorkerState.IN_WORLD, spec, None, []
        world = self.job.worlds.setdefault(spec.generation, World(spec))
        assert world.spec.slices == spec.slices
        assert spec.slices[spec.rank] == self.index
        self.world = world
        self.later(self.job.jitter_s(), self._form, world)

    def _form(self) -> None:
        assert self.world is not None
        world = self.world
        world.members[self.index] = self
        self._wait_for_all(world, lambda member: member.later(self.job.jitter_s(), member._rebuild, world))

    def _wait_for_all(self, world: World, then: Callable[[Worker], None]) -> None:
        """A collective: it goes on when all are in it, never when one is missing."""
        world.waiting.add(self.index)
        if world.broken:
            self._may_notice(world)
        elif world.waiting == set(world.spec.slices):
            world.waiting = set()
            for index in world.spec.slices:
                then(world.members[index])

    def _rebuild(self) -> None:
        assert self.world is not None
        assert self.spec is not None
        spec, snapshot = self.spec, None
        if spec.restore_step is not None:
            self.content = self.host.gather(spec)
            snapshot = self._begin_capture(spec.restore_step, restoring=True)
            snapshot.complete = True
        else:
            self.content = ()
        self.say(
            Rebuilt(
                slice_index=self.index,
                generation=spec.generation,
                snapshot=snapshot.summary if snapshot else None,
                form_s=0.0,
                restore_s=0.0,
                bytes_from={},
            ),
            again=True,
        )
        self._next_step()

    # ---- steps ----

    def _next_step(self) -> None:
        assert self.world is not None
        assert self.spec is not None
        done = len(self.content) - 1
        if done >= self.job.num_steps - 1 and not self.spec.rehearsal:
            self.host.finished_content = self.content
            self.say(
                Finished(
                    slice_index=self.index,
                    generation=self.spec.generation,
                    step=done,
                    snapshots=self.host.summaries(),
                ),
                again=True,
            )
        elif self.stop_after is not None and done >= self.stop_after:
            self.say(LeftWorld(slice_index=self.index, generation=self.spec.generation), again=True)
        else:
            world = self.world
            self._wait_for_all(world, lambda member: None)
            if not world.waiting and not world.broken:
                self.job.after(STEP_S * self.job.random.uniform(0.5, 1.5), lambda: self._complete(world))

    def _complete(self, world: World) -> None:
        """The collective of a step is through: for all, or for none."""
        members = [world.members[index] for index in world.spec.slices]
        if world.broken or any(not m.alive or m.world is not world for m in members):
            return
        if world.fails_next:
            world.broken = True
            for member in members:
                member._fail_step("no such luck")
            return
        self.job.check_running(world.spec.generation)
        number = len(members[0].content)
        assert {member.content for member in members} == {members[0].content}
        for member in members:
            member.content = (*member.content, (number, world.spec.generation))
            member.later(self.job.jitter_s(), member._commit, world)

    def _commit(self) -> None:
        assert self.spec is not None
        if self.spec.rehearsal:
            self.content = ()
            self.say(LeftWorld(slice_index=self.index, generation=self.spec.generation), again=True)
            return
        number = len(self.content) - 1
        snapshot = self._begin_capture(number)
        capture_s = self.job.random.uniform(0.001, 0.02)
        self.busy_until_s = self.job.now_s + capture_s

        def committed() -> None:
            snapshot.complete = True
            self.kept_slot = snapshot
            self.job.check_captured(snapshot)
            assert self.spec is not None
            self.say(Committed(slice_index=self.index, generation=snapshot.generation, step=number))
            self._next_step()

        self.later(capture_s, committed, self.world)

    def _begin_capture(self, number: int, *, restoring: bool = False) -> Snapshot:
        """Take the slot that is not the last good one; it is torn until it is complete."""
        from model_job import summary_of

        assert self.spec is not None
        slots = self.host.slots
        if restoring:
            assert number == self.spec.restore_step
            slots[:] = [slot for slot in slots if slot.step <= number]
            good = [s for s in slots if s.complete and s.step == number]
            self.kept_slot = max(good, key=lambda s: s.generation == self.spec_generation(), default=None)
        kept = self.kept_slot if self.kept_slot in slots else None
        summary = summary_of(
            self.spec.slices, self.spec.replicas, self.index, number, self.spec.generation
        )
        snapshot = Snapshot(number, self.spec.generation, self.content, summary)
        if kept is None and len(slots) > 1:
            slots.remove(min(slots, key=lambda slot: (slot.generation, slot.step)))
        else:
            slots[:] = [slot for slot in slots if slot is kept]
        slots.append(snapshot)
        if restoring:
            self.kept_slot = snapshot
        return snapshot

    def spec_generation(self) -> int | None:
        return self.spec.restore_generation if self.spec else None

    # ---- trouble ----

    def leave(self) -> None:
        """Get out of the world, unless stuck; a capture under way is finished first."""
        if self.stuck or self.state is not WorkerState.IN_WORLD:
            return
        wait_s = max(self.busy_until_s - self.job.now_s, 0.0) + self.job.random.uniform(0.01, 0.1)
        self.later(wait_s, self._unwound, self.world)

    def _unwound(self) -> None:
        if self.stuck:
            return
        world, self.world, self.spec = self.world, None, None
        self.state, self.last_words = WorkerState.READY, []
        if world is not None:
            self.break_world(world)
        if self.host.agent is not None:
            self.host.agent.heard_unwound()

    def break_world(self, world: World) -> None:
        """Without this process its world cannot go on: some notice, the others hang."""
        world.broken = True
        for index in world.spec.slices:
            member = world.members.get(index)
            if member is not None and member.alive and member.world is world:
                member._may_notice(world)

    def _may_notice(self, world: World) -> None:
        if self.index in world.waiting and self.job.random.random() < 0.5:
            self.later(self.job.jitter_s(), lambda: self._fail_step("Connection reset by peer"), world)

    def _fail_step(self, error: str) -> None:
        if self.spec is not None:
            failed = StepFailed(slice_index=self.index, generation=self.spec.generation, error=error)
            self.say(failed, again=True)

    def end(self) -> None:
        """The process ends, whatever it was doing."""
        self.alive = False
        if self.world is not None:
            self.break_world(self.world)
        if self.host.worker is self:
            self.host.worker = None


class Agent:
    """The sidecar of a host: obeys the coordinator while it is connected."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.job = host.job
        self.alive = True
        self.generation = 0
        self.fence_pending = False
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
            slice_index=self.index,
            worker=worker.state if worker else WorkerState.NONE,
            worker_pid=worker.pid if worker else 0,
            generation=self.generation,
            data_address=f"host:{self.index}",
        )
        self._send(lambda: self.job.attach(self, event))
        for word in worker.last_words if worker else ():
            self.tell(word)

    def tell(self, event: Event) -> None:
        """Send an event, in order; the coordinator hears it unless it has given this agent up."""

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
        self.job.after(
            self._up_s - self.job.now_s, lambda: self.job.detach(self.index, self, last_life_s)
        )

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
            self.host.start_worker()
        elif isinstance(command, EndWorker):
            self._end_quietly()
        elif isinstance(command, Fence):
            self._fence(command)
        elif isinstance(command, StopAfter):
            if worker is not None and worker.spec and worker.spec.generation == command.generation:
                worker.stop_after = command.step
        elif isinstance(command, Stage):
            self.job.after(self.job.random.uniform(0.005, 0.05), lambda: self._stage(command))
        elif isinstance(command, Assign):
            if worker is not None and worker.state is WorkerState.READY:
                worker.enter(command.world)
        elif isinstance(command, ComputeDigest):
            self.job.after(self.job.random.uniform(0.005, 0.05), lambda: self._digest(command))
        elif isinstance(command, ResetHost):
            self._end_quietly()
            self.attach()
        elif isinstance(command, Shutdown):
            self._end_quietly()
            self.host.is_released = True

    def _end_quietly(self) -> None:
        if self.host.worker is not None:
            self.host.worker.end()
        if self.fence_pending:
            self._report()

    def _fence(self, command: Fence) -> None:
        if command.generation < self.generation:
            return
        self.generation, self.fence_pending = command.generation, True
        worker = self.host.worker
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
                slice_index=self.index,
                pid=pid,
                cause=cause,
                detector="process-exit",
                last_life_unix_s=0.0,
            )
        )
        if self.fence_pending:
            self._report()

    def _report(self) -> None:
        self.fence_pending = False
        worker = self.host.worker
        self.tell(
            Fenced(
                slice_index=self.index,
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
            source = self.job.hosts[transfer.source.slice_index]
            content = source.serve(command.step, command.of_generation)
            if content is None:
                error = f"{transfer.source} has no step {command.step}"
                break
            contents.add(content)
            holdings.append(
                Holding(
                    host=host_of(self.index),
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
        self.tell(Staged(slice_index=self.index, generation=command.generation, error=error))

    def _digest(self, command: ComputeDigest) -> None:
        if not self.alive:
            return
        contents = {
            self.job.hosts[transfer.source.slice_index].serve(command.step, command.of_generation)
            for transfer in command.transfers
        }
        digest = "" if None in contents else str(hash(next(iter(contents))))
        assert len(contents) == 1 or not digest
        self.tell(
            DigestDone(
                slice_index=self.index,
                generation=command.generation,
                step=command.step,
                purpose=command.purpose,
                digest=digest,
            )
        )


class Host:
    """A machine: what lives on it, and what has been done to it."""

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        self.index = index
        self.is_alive = False
        self.agent: Agent | None = None
        self.attached: Agent | None = None
        self.worker: Worker | None = None
        self.slots: list[Snapshot] = []
        self.stage: Snapshot | None = None
        self.cut = False
        self.is_released = False
        self.start_fails = 0
        self.num_workers = 0
        self.finished_content: Content | None = None

    # ---- memory ----

    def summaries(self) -> tuple[SnapshotSummary, ...]:
        """What a host reports: not what it staged, which the next staging replaces."""
        return tuple(snapshot.summary for snapshot in self.slots if snapshot.complete)

    def _snapshots(self) -> list[Snapshot]:
        return self.slots if self.stage is None else [*self.slots, self.stage]

    def content_of(self, number: int, generation: int) -> Content | None:
        contents = {
            snapshot.content
            for snapshot in self._snapshots()
            if snapshot.complete and (snapshot.step, snapshot.generation) == (number, generation)
        }
        assert len(contents) <= 1, f"host {self.index} has step {number} twice: {contents}"
        return next(iter(contents), None)

    def serve(self, number: int, generation: int) -> Content | None:
        """What a peer gets; None when this host cannot be reached or has it no more."""
        if not self.is_alive or self.agent is None or self.is_released:
            return None
        return self.content_of(number, generation)

    def gather(self, spec: WorldSpec) -> Content:
        """The state to restore, from the arena and the stage: all of it, and of one timeline."""
        assert spec.restore_step is not None
        good = [
            snapshot
            for snapshot in self._snapshots()
            if snapshot.complete
            and snapshot.step == spec.restore_step
            and (
                snapshot.generation == spec.restore_generation
                or (snapshot is self.stage and snapshot.generation == spec.generation)
            )
        ]
        paths = {holding.path for snapshot in good for holding in snapshot.summary.holdings}
        assert paths == set(PATHS), f"host {self.index} lacks parts of step {spec.restore_step}: {paths}"
        (content,) = {snapshot.content for snapshot in good}
        return content

    # ---- life and death ----

    def start_agent(self) -> None:
        """A new agent adopts what there is."""
        self.is_alive = True
        self.agent = Agent(self)
        self.agent.attach()

    def start_worker(self) -> None:
        if self.worker is not None:
            self.worker.end()
        self.num_workers += 1
        worker = self.worker = Worker(self, pid=1000 * (self.index + 1) + self.num_workers)
        if self.start_fails:
            self.start_fails -= 1
            worker.later(0.2, lambda: self.kill_worker("exit status 1"))
            return

        def ready() -> None:
            worker.state = WorkerState.READY
            worker.say(WorkerReady(slice_index=self.index, pid=worker.pid))

        worker.later(self.job.random.uniform(0.3, 0.6), ready)

    def kill_worker(self, cause: str) -> None:
        worker = self.worker
        if worker is None:
            return
        worker.end()
        if self.agent is not None:
            self.agent.worker_ended(worker.pid, cause)

    def kill_agent(self, back_s: float | None) -> None:
        """The agent alone; a worker without one ends itself when its lease runs out."""
        if self.agent is None:
            return
        agent, self.agent = self.agent, None
        agent.alive = False
        if not self.cut:
            agent.break_stream(self.job.jitter_s())
        if self.worker is not None:
            worker = self.worker
            worker.later(self._lease_s, lambda: None if self.agent else worker.end())
        if back_s is not None:
            self.job.after(back_s, lambda: None if self.agent else self.start_agent())

    def kill_host(self, back_s: float | None) -> None:
        """Everything on this machine is gone."""
        if self.worker is not None:
            self.worker.end()
        self.kill_agent(back_s)
        self.is_alive, self.slots, self.stage = False, [], None

    def cut_off(self, for_s: float) -> None:
        """No message passes until healed; the agent ends its worker when the lease runs out."""
        if self.cut or self.agent is None:
            return
        self.cut = True
        self.agent.break_stream(SILENT_S)
        worker = self.worker
        if worker is not None and for_s >= self._lease_s:
            worker.later(self._lease_s, worker.end)

        def heal() -> None:
            self.cut = False
            if self.agent is not None:
                self.agent.attach()

        self.job.after(for_s, heal)

    @property
    def _lease_s(self) -> float:
        return self.job.config.timing.lease_s

    def preempt(self, grace_s: float = 3.0) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        worker = self.worker
        if worker is None:
            return
        worker.say(PreemptionNotice(slice_index=self.index))
        worker.later(grace_s, lambda: self.kill_worker("killed after its notice"))

    def fail_by_user(self, error: str) -> None:
        """The training script raises."""
        if self.agent is not None:
            self.agent.tell(WorkerFailed(slice_index=self.index, error=error))

    def fail_step(self) -> None:
        """The step under way fails on all, though nobody is lost."""
        if self.worker is not None and self.worker.world is not None:
            self.worker.world.fails_next = True


STEP_S = 0.1
SILENT_S = 0.3
PATHS = ("bias", "moments", "weights")
