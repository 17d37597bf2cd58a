"""The coordinator: the shell around the recovery state machine. It hears the agents, performs the
commands, writes the history.

One thread turns events into steps of the machine; gRPC threads only put events in its queue and take
commands out of the agents' queues. Run as `python -m elastic.coordinator DIR`; it prints nothing but
errors and writes its address to `DIR/coordinator.json`. It waits for its turn (`elastic.mandate`), goes on
from what the one before it has written down (`elastic.coordinator_log`), and ends at once when it may not
command any more.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic import control_pb2 as pb
from elastic.arbiter import FENCED_EXIT_STATUS, FencedError
from elastic.control_channel import read_place, write_place
from elastic.control_server import UnknownSenderError, make_server
from elastic.coordinator_log import CoordinatorLog, Entry
from elastic.coordinator_records import run_started, started_record
from elastic.coordinator_status import describe_job
from elastic.events import (
    AgentAttached,
    AgentLost,
    Command,
    Committed,
    ComputeDigest,
    Event,
    Peers,
    PersistedFound,
    Phase,
    ServiceLost,
    ServiceReady,
    Stage,
    StartService,
    StopRequested,
    Tick,
    Write,
)
from elastic.file_arbiter import FileArbiter
from elastic.job import JobSpec, load_job, load_token
from elastic.leash import watch_leash
from elastic.machine import step
from elastic.mandate import FreeMandate, Mandate, wait_mandate
from elastic.moves_resume import resume
from elastic.persistent_reads import find_persisted
from elastic.protocol import CONTROL_CODEC, CommitsKept, Heartbeat, StepTold
from elastic.records import (
    FaultInjected,
    MessageRefused,
    Record,
    RunEnded,
    ServiceStarted,
    WorldFormed,
)
from elastic.refusals import RefusalLedger, RefusalsTold, Surface
from elastic.roster import Outbox, Roster
from elastic.runtime_service import ServicePool
from elastic.saved_state import restore
from elastic.shadow_events import EndShadowService, ShadowServiceReady, StartShadowService
from elastic.shadow_service import ShadowService
from elastic.state import initial_state
from elastic.stragglers import StragglerWatch
from elastic.telemetry import RecoveryTracer
from elastic.turn import Clock
from elastic.wire import WireError
from reshard.errors import ElasticError

LIFE_EVERY_S = 2.0
FAILED_DRAIN_S = 3.0
_OVER = (Phase.COMPLETED, Phase.FAILED)


def _now() -> Clock:
    return Clock(mono_s=time.monotonic(), unix_s=time.time())


def end_fenced(error: FencedError) -> None:
    """End this process at once: another coordinator may command already."""
    print(f"elastic: this coordinator ends: {error.message}", file=sys.stderr, flush=True)
    os._exit(FENCED_EXIT_STATUS)


class Coordinator:
    """Decides for one job; `run` returns when the job has ended and all agents were told so. `on_fenced` is
    called, from any thread, when this one may not decide any more.
    """

    def __init__(
        self,
        spec: JobSpec,
        token: str,
        mandate: Mandate | None = None,
        on_fenced: Callable[[FencedError], None] = end_fenced,
    ) -> None:
        self._spec = spec
        self._token = token
        self._mandate = mandate or FreeMandate()
        self._on_fenced = on_fenced
        self._inbox: queue.SimpleQueue[tuple[int, Event | StepTold | FaultInjected | None]] = (
            queue.SimpleQueue()
        )
        self._roster = Roster()
        self._state = initial_state(spec.config, time.monotonic())
        self._log = CoordinatorLog(
            spec.directory, self._mandate.epoch, self._mandate.check, is_shared=spec.arbiter is not None
        )
        self._tracer = RecoveryTracer()
        self._stragglers = StragglerWatch(rule=spec.config.stragglers)
        self._refusals = RefusalLedger()
        self._shown_life_s = 0.0
        self._services = ServicePool(
            spec.service_command, spec.bind_host, self._service_ready, self._service_lost
        )

        self._shadow = ShadowService(
            spec.service_command, spec.bind_host, self._shadow_ready, self._shadow_failed
        )

    @property
    def generation(self) -> int:
        """The newest generation."""
        return self._state.generation

    # ---- called from gRPC threads ----

    def attach(self, first: pb.Envelope) -> Outbox:
        """Take in an agent's first message; returns its queue of commands. Raises WireError."""
        self._check_epoch(first)
        event = CONTROL_CODEC.decode(first.kind, first.body)
        if not isinstance(event, AgentAttached):
            raise WireError(f"an agent's first message must be AgentAttached, not {first.kind}")
        index = event.member
        if index != first.member or not 0 <= index < self._spec.config.num_members:
            raise UnknownSenderError(f"there is no slice {index} in this job, or it is not the sender's")
        outbox = self._roster.attach(index, event.data_address)
        self._inbox.put((index, event))
        return outbox

    def may_command(self) -> bool:
        """Whether this coordinator's lease is valid."""
        return self._mandate.is_valid

    def hear(self, member: int, outbox: Outbox, envelope: pb.Envelope) -> None:
        """Take in one message of an attached agent."""
        if not self._roster.heard(member, outbox):
            return
        self._check_epoch(envelope)
        value = CONTROL_CODEC.decode(envelope.kind, envelope.body)
        if isinstance(value, RefusalsTold):
            sender = f"slice {member}: {value.sender}"
            self.refuse(sender, value.reason, value.reason, surface=value.surface, num=value.num)
        elif not isinstance(value, Heartbeat):
            self._inbox.put((member, value))

    def detach(self, member: int, outbox: Outbox) -> None:
        """An agent's stream has ended."""
        agent = self._roster.detach(member, outbox)
        if agent is not None:
            life_s = agent.heard_unix_s
            lost = AgentLost(member=member, detector="agent-stream", last_life_unix_s=life_s)
            self._inbox.put((member, lost))

    def note(self, envelope: pb.Envelope) -> None:
        """Take in a record from outside the job."""
        value = CONTROL_CODEC.decode(envelope.kind, envelope.body)
        if not isinstance(value, FaultInjected):
            raise WireError(f"{envelope.kind} cannot be noted from outside")
        self._inbox.put((-1, value))

    def refuse(
        self, sender: str, reason: str, cause: str, *, surface: Surface = "control", num: int = 1
    ) -> None:
        """Count callers that were refused, and write it down as far as there is room for it."""
        self._count_refused(
            MessageRefused(
                unix_s=time.time(),
                generation=self.generation,
                sender=sender,
                reason=reason,
                surface=surface,
                cause=cause,
                num=num,
            )
        )

    def _count_refused(self, refused: MessageRefused) -> None:
        self._tracer.hear(refused)
        record = self._refusals.take(refused)
        if record is not None and self._state.phase not in _OVER and self._mandate.is_valid:
            self._log.history.write(record)

    def stop(self, reason: str) -> None:
        """End the job."""
        self._inbox.put((-1, StopRequested(reason=reason)))

    def status(self) -> bytes:
        """The job as JSON, for `elastic status`."""
        return describe_job(
            self._spec,
            self._state,
            self._mandate.epoch,
            self._refusals.counts(),
            list(self._stragglers.seen.values()),
            time.monotonic(),
        )

    def _check_epoch(self, envelope: pb.Envelope) -> None:
        if envelope.epoch > self._mandate.epoch:
            self._mandate.lose(
                f"the agent of slice {envelope.member} has heard from a coordinator of epoch"
                f" {envelope.epoch}, this is epoch {self._mandate.epoch}"
            )
            self._fence()

    def _fence(self) -> None:
        try:
            self._mandate.check()
        except FencedError as error:
            self._on_fenced(error)

    # ---- the one thread that decides ----

    def run(self) -> int:
        """Decide until the job has ended; returns the exit status. Raises FencedError."""
        self._begin()
        tick_s = self._spec.heartbeat_s
        next_tick_s = time.monotonic()
        while self._state.phase not in _OVER:
            wait_s = max(next_tick_s - time.monotonic(), 0.0)
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=wait_s))
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + tick_s
                self._look_for_silent_agents()
                self._show_life()
                self._services.look()
                self._step(Tick())
        self._drain()
        self.close()
        return 0 if self._state.phase is Phase.COMPLETED else 1

    def close(self) -> None:
        """End the runtime services and close the history."""
        self._shadow.end()
        self._services.close()
        self._log.close()

    def _begin(self) -> None:
        """Begin the job, or go on with what the coordinator before this one has written down."""
        entry = self._log.take_over()
        if entry is not None:
            self._resume(entry)
            return
        self._log.write(run_started(self._spec))
        self._log.write(started_record(self._mandate.epoch, None))
        if self._spec.persist_root is not None:
            self._step(PersistedFound(snapshots=find_persisted(self._spec.persist_root)))

    def _resume(self, entry: Entry) -> None:
        self._log.write(started_record(self._mandate.epoch, entry.state))
        root = self._spec.persist_root
        found = () if root is None else find_persisted(root)
        now = _now()
        restored = restore(entry.state, self._spec.config, now.mono_s, found)
        self._services.adopt(entry.services, restored.runtime_generation)
        self._state, commands = resume(restored, now)
        self._perform(commands)

    def _take(self, sender: int, event: Any) -> None:
        self._mandate.check()
        if isinstance(event, FaultInjected):
            self._write(event)
        elif isinstance(event, StepTold):
            self._hear_commit(sender, event)
        elif getattr(event, "member", sender) != sender and sender >= 0:
            reason = f"{type(event).__name__} in the name of another slice"
            self.refuse(f"slice {sender}", reason, "unknown-sender")
        else:
            if isinstance(event, ServiceReady):
                self._write_service(event)
            self._step(event)
            if isinstance(event, AgentAttached):
                self._tell_peers()

    def _hear_commit(self, sender: int, told: StepTold) -> None:
        record = told.record
        if self._log.note_commit(record, self._state.world_generation):
            self._tracer.hear(record)
            self._look_for_stragglers(record)
        self._step(
            Committed(
                member=sender,
                generation=record.generation,
                step=record.step,
                checksums=told.checksums,
                compile_s=record.compile_s,
            )
        )

    def _look_for_stragglers(self, record: Record) -> None:
        for found in self._stragglers.hear(record):
            self._log.write(found)
            self._tracer.hear(found)

    def _tell_peers(self) -> None:
        """Let every agent know where the others serve their shards."""
        addresses = self._roster.addresses()
        for index in addresses:
            self._send(Peers(member=index, addresses=addresses))

    def _write_service(self, event: ServiceReady) -> None:
        self._log.write(
            ServiceStarted(
                unix_s=time.time(),
                generation=event.generation,
                pid=self._services.pid_of(event.generation),
                address=event.address,
            )
        )

    def _step(self, event: Event) -> None:
        if self._state.phase is Phase.RUNNING:
            self._services.refill()
        self._state, commands = step(self._state, event, _now())
        self._perform(commands)

    def _perform(self, commands: tuple[Command, ...]) -> None:
        """Write down what follows from the commands, then perform them."""
        records = [c.record for c in commands if isinstance(c, Write)]
        told = [record for record in records if not isinstance(record, MessageRefused)]
        if any(isinstance(record, WorldFormed) for record in told):
            self._log.committed.clear()
        self._log.ahead(self._state, time.monotonic(), told, self._services.records())
        for command in commands:
            if isinstance(command, Write):
                self._write(command.record)
            elif isinstance(command, StartService):
                self._services.start(command.generation, command.num_processes)
            elif isinstance(command, StartShadowService):
                self._shadow.start(command.number, command.num_processes)
            elif isinstance(command, EndShadowService):
                self._shadow.end()
            else:
                self._send(command)

    def _write(self, record: Record) -> None:
        if isinstance(record, MessageRefused):
            self._count_refused(record)
            return
        if isinstance(record, RunEnded):
            for rest in self._refusals.rest():
                self._log.write(rest)
        self._log.write(record)
        self._tracer.hear(record)
        self._look_for_stragglers(record)

    def _send(self, command: Any) -> None:
        if isinstance(command, Stage | ComputeDigest):
            command = replace(command, addresses=self._roster.addresses())
        self._mandate.check()
        self._roster.put(command.member, self._envelope(command.member, command))

    def _envelope(self, member: int, value: Any) -> pb.Envelope:
        name, body = CONTROL_CODEC.encode(value)
        return pb.Envelope(
            generation=self._state.generation,
            member=member,
            kind=name,
            body=body,
            epoch=self._mandate.epoch,
        )

    def _look_for_silent_agents(self) -> None:
        for index, outbox in self._roster.silent_for(self._spec.agent_dead_s):
            self.detach(index, outbox)

    def _show_life(self) -> None:
        """Let the agents hear that somebody decides (without that for `lease_s` they stop their workers), and
        which of their commits are written down.
        """
        now_s = time.monotonic()
        if now_s - self._shown_life_s < LIFE_EVERY_S:
            return
        self._shown_life_s = now_s
        generation = self._state.world_generation
        for index in self._roster.addresses():
            self._send_word(index, Heartbeat(unix_s=time.time()))
            step = self._log.committed.get(index, -1)
            self._send_word(index, CommitsKept(member=index, generation=generation, step=step))

    def _send_word(self, index: int, value: Any) -> None:
        self._mandate.check()
        self._roster.put(index, self._envelope(index, value))

    def _service_ready(self, generation: int, address: str) -> None:
        self._inbox.put((-1, ServiceReady(generation=generation, address=address)))

    def _service_lost(self, generation: int, cause: str) -> None:
        self._inbox.put((-1, ServiceLost(generation=generation, cause=cause)))

    def _shadow_ready(self, number: int, address: str) -> None:
        self._inbox.put((-1, ShadowServiceReady(number=number, address=address)))

    def _shadow_failed(self, number: int) -> None:
        self._inbox.put((-1, ShadowServiceReady(number=number, address="", failed=True)))

    def _drain(self) -> None:
        """Wait until every agent has closed its stream: its worker has ended, its memory is gone.

        After a completed job the workers may take their time (a last save); until then the runtime
        service lives.
        """
        patient = self._state.phase is Phase.COMPLETED
        bound_s = time.monotonic() + FAILED_DRAIN_S
        while len(self._roster) and (patient or time.monotonic() < bound_s):
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=self._spec.heartbeat_s))  # an agent that comes late, say
            self._look_for_silent_agents()
            self._show_life()


class _Place:
    """Where this coordinator listens, for the agents; written again should a stale one have replaced it."""

    def __init__(self, spec: JobSpec, address: str, mandate: Mandate) -> None:
        self._spec = spec
        self._address = address
        self._mandate = mandate

    def write(self) -> None:
        """Write it. Raises FencedError."""
        self._mandate.check()
        write_place(self._spec.directory, self._address, self._spec.tls, self._mandate.epoch)

    def keep(self) -> None:
        """Write it again if it is not there."""
        with contextlib.suppress(OSError, ElasticError):
            if read_place(self._spec.directory).epoch < self._mandate.epoch:
                self.write()


def serve(directory: Path) -> int:
    """Run the coordinator of the job in `directory` to its end; waits for its turn first."""
    spec, token = load_job(directory), load_token(directory)
    watch_leash(lambda: os._exit(1))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # while it waits for its turn
    mandate = wait_mandate(FileArbiter(spec.arbiter_directory), spec.coordinator_lease_s)
    coordinator = Coordinator(spec, token, mandate)
    server, address = make_server(
        coordinator, token, spec.config.num_members, bind_host=spec.bind_host, tls=spec.tls
    )
    place = _Place(spec, address, mandate)
    mandate.keep(end_fenced, place.keep)
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop("the coordinator was told to end"))
    try:
        server.start()
        place.write()
        return coordinator.run()
    except FencedError as error:
        end_fenced(error)
        raise
    finally:
        server.stop(grace=0.2)


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1])))
