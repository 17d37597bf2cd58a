"""A whole job in memory on virtual time: the real recovery state machine, and a model of all it commands.

Hosts have an agent, a worker and an arena of two slots; messages take time and keep their order; a step
completes only when all workers of one world are in it. What must always hold is asserted at every event, so a
broken promise fails where it is broken. Everything follows from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from model_host import Host
from model_state import Content, layout_for
from model_worker import Snapshot, World

from elastic.choose import choose_persisted, choose_restore
from elastic.events import (
    AgentAttached,
    AgentLost,
    Command,
    Event,
    PersistedFound,
    Phase,
    ServiceReady,
    SnapshotSummary,
    StartService,
    Tick,
    WorkerState,
    Write,
)
from elastic.machine import step
from elastic.members import member_of
from elastic.moves_resume import resume
from elastic.records import (
    CorruptionSuspected,
    LossDetected,
    PhaseEntered,
    Record,
    RestoreChecked,
    RunEnded,
    WorldFormed,
)
from elastic.saved_state import SavedState, restore, save
from elastic.shadow_events import EndShadowService, ShadowServiceReady, StartShadowService
from elastic.state import Config, JobState, Timing, initial_state
from elastic.turn import Clock
from reshard.ids import HostId

TIMING = Timing(
    start_s=15.0,
    suspect_s=1.0,
    probe_s=0.5,
    unwind_s=0.5,
    stage_s=4.0,
    rebuild_s=6.0,
    join_s=6.0,
    agent_grace_s=1.0,
    wait_s=10.0,
    gather_s=1.0,
    lease_s=4.0,
    digest_s=2.0,
    persist_s=4.0,
)
TICK_S = 0.1
UNIX_S = 1_000_000.0


class Job:
    """The coordinator's shell, the hosts and the clock."""

    def __init__(
        self,
        num_slices: int = 3,
        *,
        seed: int = 0,
        num_steps: int = 20,
        delay_s: tuple[float, float] = (0.001, 0.01),
        late_s: dict[int, float] | None = None,
        persist_every: int | None = None,
        disk: dict[int, tuple[int, Content]] | None = None,
        **config: Any,
    ) -> None:
        config.setdefault("rehearsals", 0)
        config.setdefault("persists", persist_every is not None)
        self.config = Config(num_slices=num_slices, **{"timing": TIMING, **config})
        self.random = random.Random(seed)
        self.num_steps = num_steps
        self.delay_s = delay_s
        self.now_s = 0.0
        self.state: JobState = initial_state(self.config, 0.0)
        self.history: list[Record] = []
        self.sent: list[Command] = []
        self.hooks: list[tuple[Callable[[Job], bool], Callable[[], None]]] = []
        self.worlds: dict[int, World] = {}
        self.newest_running_generation = 0
        self.restored: list[tuple[int, Content]] = []
        self.next_restored: Content = ()
        self.service_works = True
        self.shadow_fails = 0.0
        """How likely a process of a shadow group is to fail at each thing it does."""
        self.persist_every = persist_every
        self.disk: dict[int, tuple[int, Content]] = dict(disk or {})
        """The persistent tier: by step, who captured it (generation) and what it is made of."""
        self.shares: dict[tuple[int, int], dict[int, Content]] = {}
        self.disk_works = True
        self.digest_s = (0.005, 0.05)
        self.share_s = (0.01, 0.08)
        self.finish_s = 0.02
        self.stuck_hosts: set[int] = set()
        """Hosts whose share of a snapshot is never written."""
        self.unreadable: set[int] = set()
        self.kernel_says = ""
        """What agents find that speaks for want of memory, when a worker is killed."""
        self.is_down = False
        self.crash_due = False
        """Whether the coordinator dies in the middle of what it does about the next event."""
        self.num_crashes = 0
        self.crash_away_s = 0.0
        self._agent_pids = itertools.count(1)
        self.hosts = [Host(self, index) for index in range(self.config.num_members)]
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        if self.disk:
            self.tell(PersistedFound(snapshots=tuple(map(self.persisted_summary, sorted(self.disk)[::-1]))))
        for host in self.hosts:
            self.after((late_s or {}).get(host.index, 0.0), host.start_agent)
        self.after(TICK_S, self._tick)

    # ---- time ----

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, action))

    def jitter_s(self) -> float:
        """How long a message takes."""
        return self.random.uniform(*self.delay_s)

    def when(self, condition: Callable[[Job], bool], action: Callable[[], None]) -> None:
        """Do something once, at the first event after which the condition holds."""
        self.hooks.append((condition, action))

    def when_step(self, number: int, action: Callable[[], None]) -> None:
        """Do something when the coordinator knows of this step."""
        self.when(lambda job: job.state.newest_committed >= number, action)

    def when_phase(self, phase: Phase, action: Callable[[], None], *, generation: int = 0) -> None:
        """Do something when this phase is reached, in this generation or later."""
        self.when(lambda job: job.state.phase is phase and job.state.generation >= generation, action)

    def run(self, until_s: float = 120.0) -> Job:
        """Let time pass until the job has ended and everybody knows, or until the bound."""
        while self._heap and not (self.is_over and all(host.is_released for host in self.hosts)):
            moment_s, _, action = heapq.heappop(self._heap)
            if moment_s > until_s:
                self.now_s = until_s
                return self
            self.now_s = moment_s
            action()
        return self

    @property
    def is_over(self) -> bool:
        """Whether the coordinator has ended the job."""
        return self.state.phase in (Phase.COMPLETED, Phase.FAILED)

    def _tick(self) -> None:
        if not self.is_down:
            self.tell(Tick())
        self.after(TICK_S, self._tick)

    # ---- the coordinator's shell ----

    def tell(self, event: Event) -> None:
        """Let the machine hear an event, and perform what it commands."""
        if self.is_down:
            return
        if isinstance(event, AgentLost):
            self.hosts[event.member].attached = None
        before = self.state
        self.state, commands = step(before, event, Clock(mono_s=self.now_s, unix_s=UNIX_S + self.now_s))
        self.sent.extend(commands)
        writes = (command for command in commands if isinstance(command, Write))
        assert not any(isinstance(write.record, CorruptionSuspected) for write in writes), "no copy differs"
        if self.crash_due:
            commands = self._crash(commands)
        for command in commands:
            self._perform(command)
        self._check(before)
        due = [hook for hook in self.hooks if hook[0](self)]
        for hook in due:
            self.hooks.remove(hook)
            hook[1]()

    def crash_coordinator(self, away_s: float) -> None:
        """The coordinator dies at the next event: what follows from it is written down, a part is done."""
        self.crash_due, self.crash_away_s = True, away_s

    def next_agent_pid(self) -> int:
        """Every agent is a process of its own."""
        return next(self._agent_pids)

    def _crash(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        """What is still performed; records are written by the next coordinator if they are not yet."""
        self.crash_due, self.is_down = False, True
        self.num_crashes += 1
        saved = msgspec.msgpack.encode(save(self.state, self.now_s))
        newest = self.state.newest_committed
        for host in self.hosts:
            if host.attached is not None and host.worker is not None and self.crash_away_s >= TIMING.lease_s:
                host.worker.later(TIMING.lease_s, host.worker.end)
        self.after(self.crash_away_s, lambda: self._take_over(saved, newest))
        records = [command for command in commands if isinstance(command, Write)]
        others = [command for command in commands if not isinstance(command, Write)]
        done = self.random.randint(0, len(others))
        return (*records, *others[:done])

    def _take_over(self, saved: bytes, newest: int) -> None:
        """Another coordinator begins with what was written down; the agents come one after the other."""
        for host in self.hosts:
            host.attached = None
        found = tuple(map(self.persisted_summary, sorted(self.disk)[::-1]))
        state = restore(msgspec.msgpack.decode(saved, type=SavedState), self.config, self.now_s, found)
        state = replace(state, newest_committed=max(newest, state.newest_committed))
        before = self.state
        now = Clock(mono_s=self.now_s, unix_s=UNIX_S + self.now_s)
        self.is_down = False
        self.state, commands = resume(state, now)
        for command in commands:
            self._perform(command)
        self._check(before)
        for host in self.hosts:
            if host.agent is not None and not host.cut:
                host.agent.attach()

    def _perform(self, command: Command) -> None:
        if isinstance(command, Write):
            self.history.append(command.record)
            if isinstance(command.record, WorldFormed):
                self._check_world(command.record)
        elif isinstance(command, StartService):
            if self.service_works:
                ready = ServiceReady(generation=command.generation, address=f"service:{command.generation}")
                self.after(self.jitter_s(), lambda: self.tell(ready))
        elif isinstance(command, StartShadowService):
            up = ShadowServiceReady(number=command.number, address=f"shadow:{command.number}")
            self.after(self.jitter_s(), lambda: self.tell(up))
        elif not isinstance(command, EndShadowService):
            agent = self.hosts[command.member].attached
            if agent is not None:
                agent.receive_later(command)

    def persisted_summary(self, number: int) -> SnapshotSummary:
        """What an agent tells of a snapshot in the persistent tier."""
        generation, _ = self.disk[number]
        layout = layout_for(tuple(range(self.config.num_slices)), self.config.hosts_per_slice)
        return SnapshotSummary(step=number, generation=generation, layout=layout, holdings=())

    # ---- what must always hold ----

    def _check(self, before: JobState) -> None:
        state = self.state
        assert state.generation >= before.generation
        whole = [member for index in state.world_slices for member in self.config.members_of(index)]
        assert list(state.world) == whole, "a world holds a part of a slice"
        if state.phase is Phase.REBUILDING and before.phase is not Phase.REBUILDING:
            kept = len(self.next_restored)
            self.restored = [(generation, content[:kept]) for generation, content in self.restored]
            self.restored.append((state.generation, self.next_restored))
        assert not (self.is_over and before.phase is state.phase and state.error != before.error)
        if state.phase is Phase.FAILED and before.phase is not Phase.FAILED and "is lost" in state.error:
            held = {self.config.host(host.index): host.summaries() for host in self.hosts if host.is_alive}
            choice, _ = choose_restore(held, dict(state.restored_steps))
            assert choice is None, f"given up although step {choice} is whole"
            assert choose_persisted(state.persisted, dict(state.restored_steps)) is None
        if state.phase is Phase.COMPLETED and before.phase is not Phase.COMPLETED:
            assert state.newest_committed == self.num_steps - 1
            assert state.finished_step == self.num_steps - 1

    def _check_world(self, world: WorldFormed) -> None:
        assert len(world.slices) >= self.config.min_slices
        assert list(world.slices) == [index for index in self.state.seats if index in world.slices]
        assert world.generation not in self.worlds
        assert self.state.world == tuple(m for index in world.slices for m in self.config.members_of(index))
        for index in self.state.world:
            assert self.state.member(index).attached
            assert self.state.member(index).worker is WorkerState.READY
        self.next_restored = ()
        choice = self.state.choice
        if choice is None:
            assert self.state.newest_committed == -1, "silently from scratch"
            return
        contents = {
            self.host(holding.host).content_of(choice.step, choice.generation) for holding in choice.holdings
        } - {None}
        if choice.is_persisted:
            contents = {self.disk[choice.step][1]}
        assert len(contents) <= 1, f"two lineages mixed: {contents}"
        for content in contents:
            assert content is not None
            for generation, earlier in self.restored:
                shared = min(len(earlier), len(content))
                beyond = content[shared:]
                assert earlier[:shared] == content[:shared], f"{content} was left behind by {earlier}"
                assert all(made_by >= generation for _, made_by in beyond), f"left behind: {content}"
            self.next_restored = content

    def check_running(self, generation: int) -> None:
        """A world makes progress: no newer one may have made any."""
        assert generation >= self.newest_running_generation, (
            f"generation {generation} makes a step after {self.newest_running_generation} did"
        )
        self.newest_running_generation = generation

    def check_captured(self, snapshot: Snapshot) -> None:
        """A committed state contains every step once."""
        steps = [number for number, _ in snapshot.content]
        assert steps == list(range(snapshot.step + 1)), f"step {snapshot.step} is made of {steps}"

    # ---- what tests ask ----

    def host(self, host: HostId) -> Host:
        """The modelled machine."""
        return self.hosts[member_of(host, self.config.hosts_per_slice)]

    def records(self, kind: type[Any]) -> list[Any]:
        """The records of one type."""
        return [record for record in self.history if isinstance(record, kind)]

    @property
    def formed(self) -> list[WorldFormed]:
        """The worlds that train."""
        return [world for world in self.records(WorldFormed) if world.mode != "rehearsal"]

    @property
    def phases(self) -> list[str]:
        """The phases in order."""
        return [record.phase for record in self.records(PhaseEntered)]

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Who was lost and who noticed."""
        return [(loss.slice_index, loss.detector) for loss in self.records(LossDetected)]

    @property
    def outcome(self) -> tuple[str, str]:
        """How the run ended, and the error."""
        ends: list[RunEnded] = self.records(RunEnded)
        assert len(ends) == 1, f"{len(ends)} ends; phases {self.phases[-12:]} at {self.now_s:.2f} s"
        assert self.history[-1] is ends[0]
        return ends[0].outcome, ends[0].error

    def assert_completed(self) -> None:
        """The run is complete, every step is in the final state and every digest is right."""
        assert self.outcome == ("completed", "")
        for check in self.records(RestoreChecked):
            assert check.captured_digest == check.restored_digest
        finished = [host.finished_content for host in self.hosts if host.finished_content is not None]
        assert finished
        assert {tuple(number for number, _ in content) for content in finished} == {
            tuple(range(self.num_steps))
        }

    # ---- faults ----

    def kill_worker(self, index: int) -> None:
        """SIGKILL of a worker."""
        self.hosts[index].kill_worker("killed by SIGKILL")

    def kill_workers(self, *indexes: int) -> None:
        """SIGKILL of several workers at once."""
        for index in indexes:
            self.kill_worker(index)

    def kill_hosts(self, *indexes: int, back_s: float | None = None) -> None:
        """Several machines at once."""
        for index in indexes:
            self.kill_host(index, back_s)

    def kill_agent(self, index: int, back_s: float | None = None) -> None:
        """SIGKILL of an agent; its supervisor starts another after `back_s`."""
        self.hosts[index].kill_agent(back_s)

    def kill_host(self, index: int, back_s: float | None = None) -> None:
        """Worker, agent and arena at once."""
        self.hosts[index].kill_host(back_s)

    def cut(self, index: int, for_s: float) -> None:
        """Nothing passes between a host's agent and the coordinator for a while."""
        self.hosts[index].cut_off(for_s)

    def detach(self, index: int, agent: object, last_life_s: float) -> None:
        """The coordinator notices that an agent is gone."""
        if self.hosts[index].attached is agent:
            last = UNIX_S + last_life_s
            self.tell(AgentLost(member=index, detector="agent-stream", last_life_unix_s=last))

    def attach(self, agent: Any, event: AgentAttached) -> None:
        """An agent connects."""
        if self.is_down:
            return
        self.hosts[event.member].attached = agent
        self.tell(event)
