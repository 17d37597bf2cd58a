"""The training process of a modelled host, its world and its captures."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from model_state import Content, layout_for, summary_of

from elastic.events import (
    Captured,
    Committed,
    Event,
    Finished,
    LaidOut,
    LeftWorld,
    Rebuilt,
    SnapshotSummary,
    StepFailed,
    WorkerState,
    WorldSpec,
)
from elastic.members import member_of
from reshard.copies import pack_checksums

if TYPE_CHECKING:
    from model_host import Host

STEP_S = 0.1


@dataclass(slots=True)
class Snapshot:
    """A slot of an arena: `complete` is its commit word."""

    step: int
    generation: int
    content: Content
    summary: SnapshotSummary
    complete: bool = False

    def told(self, member: int) -> Captured:
        """What a worker tells of it: checksums that are the same for the same content."""
        checksums = [zlib.crc32(repr((self.content, h.path)).encode()) for h in self.summary.holdings]
        return Captured(
            member=member,
            generation=self.generation,
            step=self.step,
            checksums=pack_checksums(checksums),
        )


@dataclass(slots=True)
class World:
    """The workers that have entered a world, and those that wait in its next collective."""

    spec: WorldSpec
    members: dict[int, Worker] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    broken: bool = False
    fails_next: bool = False


def members_of(spec: WorldSpec) -> list[int]:
    """The members of a world in rank order."""
    return [member_of(host, spec.hosts_per_slice) for host in spec.hosts]


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
        self.hangs = False
        """Whether it gets into no further collective: its main thread is in the script …"""
        self.waits = False
        """… or it waits in the runtime."""
        self.busy_until_s = 0.0
        self.kept_slot: Snapshot | None = None
        self.last_words: list[Event] = []
        self.connected = 0
        """The generation in whose runtime it is connected (0: in none)."""
        self.keeps_runtime = False
        self.num_solo = 0
        """Worlds that it has played alone."""

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
        if spec.solo:
            self.connected, self.num_solo = 0, self.num_solo + 1
            self.later(self.job.random.uniform(0.05, 0.5), self._end_solo)
            return
        world = self.job.worlds.setdefault(spec.generation, World(spec))
        assert world.spec.slices == spec.slices
        assert members_of(spec)[spec.rank] == self.index
        assert spec.runtime_generation in (0, self.connected)
        self.connected = spec.runtime_generation
        self.world = world
        self.later(self.job.jitter_s(), self._form, world)

    def _end_solo(self) -> None:
        """The rehearsal alone is over, or was broken off."""
        if self.spec is not None and self.spec.solo:
            self._unwound()

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
        elif world.waiting == set(members_of(world.spec)):
            world.waiting = set()
            for index in members_of(world.spec):
                then(world.members[index])

    def _rebuild(self) -> None:
        assert self.world is not None
        self.connected = self.connected or self.world.spec.generation
        assert self.spec is not None
        spec, snapshot = self.spec, None
        if spec.rank == 0:
            layout = layout_for(spec.slices, spec.hosts_per_slice)
            laid_out = LaidOut(member=self.index, generation=spec.generation, layout=layout)
            self.say(laid_out, again=True)
        if spec.restore_step is not None:
            self.content = self.host.gather(spec)
            snapshot = self._begin_capture(spec.restore_step, restoring=True)
            snapshot.complete = True
            self.say(snapshot.told(self.index))
        else:
            self.content = ()
        self.say(
            Rebuilt(
                member=self.index,
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
                    member=self.index,
                    generation=self.spec.generation,
                    step=done,
                    snapshots=self.host.summaries(),
                ),
                again=True,
            )
        elif self.stop_after is not None and done >= self.stop_after:
            self.say(LeftWorld(member=self.index, generation=self.spec.generation), again=True)
        elif not self.hangs:
            world = self.world
            self._wait_for_all(world, lambda member: None)
            if not world.waiting and not world.broken:
                self.job.after(STEP_S * self.job.random.uniform(0.5, 1.5), lambda: self._complete(world))

    def _complete(self, world: World) -> None:
        """The collective of a step is through: for all, or for none."""
        members = [world.members[index] for index in members_of(world.spec)]
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
            self.say(LeftWorld(member=self.index, generation=self.spec.generation), again=True)
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
            self.say(snapshot.told(self.index))
            self.say(Committed(member=self.index, generation=snapshot.generation, step=number))
            every, is_last = self.job.persist_every, number + 1 == self.job.num_steps
            if every and ((number + 1) % every == 0 or is_last) and self.host.agent is not None:
                self.host.agent.write_share(snapshot)
            self._next_step()

        self.later(capture_s, committed, self.world)

    def _begin_capture(self, number: int, *, restoring: bool = False) -> Snapshot:
        """Take the slot that is not the last good one; it is torn until it is complete."""
        assert self.spec is not None
        slots = self.host.slots
        if restoring:
            assert number == self.spec.restore_step
            slots[:] = [slot for slot in slots if slot.step <= number]
            good = [s for s in slots if s.complete and s.step == number]
            self.kept_slot = max(good, key=lambda s: s.generation == self.spec_generation(), default=None)
        kept = self.kept_slot if self.kept_slot in slots else None
        spec = self.spec
        summary = summary_of(
            spec.slices, spec.replicas, self.index, number, spec.generation, spec.hosts_per_slice
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
        self.hear_fence(keeps_runtime=self.keeps_runtime)
        if world is not None:
            self.break_world(world)
        if self.host.agent is not None:
            self.host.agent.heard_unwound()

    def hear_fence(self, *, keeps_runtime: bool) -> None:
        """Outside of a world what is not to be kept is let go; in one, once it is left."""
        self.keeps_runtime = keeps_runtime
        if not keeps_runtime and self.state is WorkerState.READY:
            self.connected = 0

    def break_world(self, world: World) -> None:
        """Without this process its world cannot go on: some notice, the others hang."""
        world.broken = True
        for index in members_of(world.spec):
            member = world.members.get(index)
            if member is not None and member.alive and member.world is world:
                member._may_notice(world)

    def _may_notice(self, world: World) -> None:
        if self.index in world.waiting and self.job.random.random() < 0.5:
            self.later(self.job.jitter_s(), lambda: self._fail_step("Connection reset by peer"), world)

    def _fail_step(self, error: str) -> None:
        if self.spec is not None:
            failed = StepFailed(member=self.index, generation=self.spec.generation, error=error)
            self.say(failed, again=True)

    def end(self) -> None:
        """The process ends, whatever it was doing."""
        self.alive = False
        if self.world is not None:
            self.break_world(self.world)
        if self.host.worker is self:
            self.host.worker = None
