"""A machine of a modelled job: its memory, what lives on it, and what is done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_agent import Agent
from model_state import Content, layout_for
from model_worker import Snapshot, Worker

from elastic.events import (
    PreemptionNotice,
    SnapshotSummary,
    WorkerFailed,
    WorkerReady,
    WorkerState,
    WorldSpec,
)
from reshard.boxes import uncovered

if TYPE_CHECKING:
    from model_job import Job

SILENT_S = 0.3


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
        self.is_deaf = False
        """Whether its worker answers nobody."""
        self.is_released = False
        self.start_fails = 0
        self.never_ready = False
        """Whether its workers never come to their session."""
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
        """The state to restore, from the arena and the stage: all of it, and of one lineage."""
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
        layout = layout_for(spec.slices, spec.hosts_per_slice)
        for array in layout.arrays:
            held = [h.box for s in good for h in s.summary.holdings if h.path == array.path]
            for box in layout.boxes_by_host(array)[spec.hosts[spec.rank]]:
                lacking = uncovered(box, held)
                assert not lacking, f"host {self.index} lacks {lacking} of step {spec.restore_step}"
        (content,) = {snapshot.content for snapshot in good}
        return content

    # ---- life and death ----

    def start_agent(self) -> None:
        """A new agent adopts what there is."""
        self.is_alive = True
        self.agent = Agent(self)
        if self.worker is not None and self.worker.spec is not None:
            self.agent.generation = self.worker.spec.generation
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
        if self.never_ready:
            return

        def ready() -> None:
            worker.state = WorkerState.READY
            worker.say(WorkerReady(member=self.index, pid=worker.pid))

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
        worker.say(PreemptionNotice(member=self.index))
        worker.later(grace_s, lambda: self.kill_worker("killed after its notice"))

    def fail_by_user(self, error: str) -> None:
        """The training script raises."""
        if self.agent is not None:
            self.agent.tell(WorkerFailed(member=self.index, error=error))

    def fail_step(self) -> None:
        """The step under way fails on all, though nobody is lost."""
        if self.worker is not None and self.worker.world is not None:
            self.worker.world.fails_next = True
