"""The engine of one process: the shell around the state machine, with virtual hosts in place of agents.

It lives on the training thread: whatever is to happen (a fault, a wish to stop, a deadline) waits in the
inbox until the training loop makes its next call, which pumps. So no capture or restore is ever interrupted.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace

from controller_adapter.local.faults import SimulatedFault, check_kinds
from controller_adapter.local.host import VirtualHost
from controller_adapter.local.hosts import IN_PROCESS, VirtualHosts
from elastic.events import (
    Committed,
    Event,
    PersistedFound,
    Phase,
    PreemptionNotice,
    ServiceReady,
    StartService,
    StopRequested,
    Tick,
    WorkerLost,
    WorkerState,
    Write,
)
from elastic.history import HistoryWriter
from elastic.job import JobSpec
from elastic.machine import step
from elastic.persistent_reads import find_persisted
from elastic.protocol import WorkerCommitted
from elastic.records import FaultInjected, Record, RunStarted, WorkerEvent
from elastic.shadow_events import EndShadowService, StartShadowService
from elastic.state import Config, initial_state
from elastic.telemetry import RecoveryTracer
from elastic.turn import Clock

TICK_S = 0.05
FOREVER_S = 86_400.0


def system_clock() -> Clock:
    """The moment now."""
    return Clock(mono_s=time.monotonic(), unix_s=time.time())


def local_config(config: Config) -> Config:
    """The job's configuration for one process.

    Nothing bounds the one training thread: it cannot be ended and started again, and always comes back from
    its step. Nothing is compiled beforehand.
    """
    timing = replace(
        config.timing,
        unwind_s=FOREVER_S,
        suspect_s=2 * FOREVER_S,
        hang_after_s=None,
        start_s=3 * FOREVER_S,
        stage_s=FOREVER_S,
        rebuild_s=FOREVER_S,
        join_s=3 * FOREVER_S,
        digest_s=FOREVER_S,
    )
    return replace(config, rehearsals=0, precompile=False, timing=timing)


def run_started(spec: JobSpec) -> RunStarted:
    """The first record of a job's history."""
    return RunStarted(
        unix_s=time.time(),
        run_id=spec.job_id,
        adapter=spec.adapter,
        in_place=spec.in_place,
        simulated_faults=spec.simulated_faults,
        slices=spec.config.num_slices,
        min_slices=spec.config.min_slices,
        devices_per_host=spec.config.devices_per_host,
        replicas=spec.config.replicas,
        seed=spec.seed,
        target_steps=spec.target_steps,
        command=spec.command,
    )


class LocalEngine:
    """Decides for the job of this process.

    `inject`, `stop` and `write` are for any thread, everything else is for the training thread.
    """

    def __init__(
        self,
        spec: JobSpec,
        history: HistoryWriter,
        on_over: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], Clock] = system_clock,
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._history = history
        self._tracer = RecoveryTracer()
        self._state = initial_state(local_config(spec.config), clock().mono_s)
        self._inbox: queue.SimpleQueue[Event | SimulatedFault] = queue.SimpleQueue()
        self._ticked_s = 0.0
        self._on_over = on_over
        self.hosts = VirtualHosts(spec, self._inbox.put)
        if spec.persist_root is not None:
            self._inbox.put(PersistedFound(snapshots=find_persisted(spec.persist_root)))
        self.hosts.attach()

    def is_over(self) -> bool:
        """Whether the job has completed or failed."""
        return self._state.phase in (Phase.COMPLETED, Phase.FAILED)

    def is_failed(self) -> bool:
        """Whether the job has failed, or was stopped."""
        return self._state.phase is Phase.FAILED

    @property
    def error(self) -> str:
        """Why the job has failed."""
        return self._state.error

    # ---- for any thread ----

    def inject(self, kind: str, slices: tuple[int, ...], *, note: bool = False) -> None:
        """Cause a fault: it takes effect at the training loop's next call. `note` writes it down.

        Raises UsageError for an unknown kind or slice.
        """
        check_kinds([kind])
        for index in slices:
            self._state.member(index)
        now = self._clock()
        for index in slices if note else ():
            self.write(FaultInjected(unix_s=now.unix_s, fault=kind, slice_index=index, detail="simulated"))
        self._inbox.put(SimulatedFault(kind=kind, slices=slices, unix_s=now.unix_s, mono_s=now.mono_s))

    def stop(self, reason: str) -> None:
        """Have the job end at the training loop's next call."""
        self._inbox.put(StopRequested(reason=reason))

    def write(self, record: Record) -> None:
        """Append to the history; a virtual worker has no process id."""
        if isinstance(record, WorkerEvent) and record.pid:
            record = replace(record, pid=0)
        self._history.write(record)

    # ---- run by whichever call the training thread makes ----

    def pump(self, wait_s: float = 0.0) -> None:
        """Do all there is to do; without anything, wait up to `wait_s` for something."""
        self._look_after()
        try:
            item = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            while True:
                if isinstance(item, SimulatedFault):
                    self._suffer(item)
                else:
                    self.take(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def take(self, event: Event) -> None:
        """Let the machine take one step, and perform its commands. What comes after the end is ignored."""
        if self.is_over():
            return
        self._state, commands = step(self._state, event, self._clock())
        for command in commands:
            if isinstance(command, Write):
                self.write(command.record)
                self._tracer.hear(command.record)
            elif isinstance(command, StartService):
                self._inbox.put(ServiceReady(generation=command.generation, address=IN_PROCESS))
            elif not isinstance(command, StartShadowService | EndShadowService):
                self.hosts.perform(command)
        if self.is_over():
            self._on_over()

    def commit(self, message: WorkerCommitted) -> None:
        """Take in that a step is good on all slices of the world, each with its own journal's entry."""
        for host in self.hosts.members():
            record = host.committed_record(message)
            if record is None:
                continue
            if record.generation == self._state.generation:
                self.write(record)
                self._tracer.hear(record)
            self.take(Committed(member=host.slice_index, generation=message.generation, step=message.step))

    def close(self) -> None:
        """End the job if it has not ended, and remove its memory; harmless when it has."""
        if not self.is_over():
            self.take(StopRequested(reason="the script ended before its training loop did"))
        self._history.close()

    def _look_after(self) -> None:
        """Give up slices that send no heartbeat; let deadlines be looked at."""
        now_s = self._clock().mono_s
        for host in self.hosts.all:
            fault = host.stopped
            if fault is not None and now_s - fault.mono_s >= self.spec.worker_stopped_s:
                self._lose(host, "it was stopped and sent no heartbeat", "worker-heartbeat", fault)
        if now_s - self._ticked_s >= TICK_S:
            self._ticked_s = now_s
            self.take(Tick())

    # ---- faults ----

    def is_held(self) -> bool:
        """Whether a slice of the world is stopped: a step of the world cannot end without it."""
        return any(host.stopped is not None for host in self.hosts.members())

    def _suffer(self, fault: SimulatedFault) -> None:
        hosts = [self.hosts.all[index] for index in fault.slices]
        if fault.kind in ("kill", "host"):
            for host in hosts:  # all at once: none of them is a source for what happens to the others
                host.lose_memory()
        for host in hosts:
            if host.worker is WorkerState.NONE:
                continue  # the fault came too late: nobody is there
            if fault.kind == "term":
                self.take(PreemptionNotice(member=host.slice_index))
            elif fault.kind == "stop":
                host.stopped = fault
            else:
                what = "its host was lost" if fault.kind == "host" else "it was killed"
                self._lose(host, what, "simulated-fault", fault)

    def _lose(self, host: VirtualHost, what: str, detector: str, fault: SimulatedFault) -> None:
        host.end()
        self.take(
            WorkerLost(
                member=host.slice_index,
                pid=host.incarnation,
                cause=f"{what} (simulated)",
                detector=detector,
                last_life_unix_s=fault.unix_s,
            )
        )
        self.hosts.report_if_fenced(host)
