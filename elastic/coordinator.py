"""The coordinator: the shell around the recovery state machine. It hears the agents, performs the
commands, writes the history.

One thread turns events into steps of the machine; gRPC threads only put events in its queue and take
commands out of the agents' queues. Run as `python -m elastic.coordinator DIR`; it prints nothing but
errors and writes its address to `DIR/coordinator.json`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from elastic import control_pb2 as pb
from elastic.control_channel import write_place
from elastic.control_server import CLOSED, UnknownSenderError, make_server
from elastic.events import (
    AgentAttached,
    AgentLost,
    Committed,
    ComputeDigest,
    Event,
    Peers,
    PersistedFound,
    Phase,
    ServiceReady,
    Stage,
    StartService,
    StopRequested,
    Tick,
    Write,
)
from elastic.history import HistoryWriter
from elastic.job import HISTORY_FILE, JobSpec, load_job, load_token
from elastic.leash import watch_leash
from elastic.machine import step
from elastic.persistent_reads import find_persisted
from elastic.protocol import CONTROL_CODEC, Heartbeat, StepTold
from elastic.quarantine import remaining_s
from elastic.records import FaultInjected, MessageRefused, RunEnded, RunStarted, StepCommitted, WorldFormed
from elastic.refusals import RefusalLedger, RefusalsTold, Surface
from elastic.runtime_service import ServicePool
from elastic.state import initial_state
from elastic.telemetry import RecoveryTracer
from elastic.turn import Clock
from elastic.wire import WireError

LIFE_EVERY_S = 2.0
FAILED_DRAIN_S = 3.0


@dataclass(slots=True)
class _Agent:
    """One attached agent: where its commands go, where it serves shards, and when it last spoke."""

    outbox: queue.SimpleQueue[Any]
    data_address: str
    heard_mono_s: float
    heard_unix_s: float


def _now() -> Clock:
    return Clock(mono_s=time.monotonic(), unix_s=time.time())


class Coordinator:
    """Decides for one job; `run` returns when the job has ended and all agents were told so."""

    def __init__(self, spec: JobSpec, token: str) -> None:
        self._spec = spec
        self._token = token
        self._inbox: queue.SimpleQueue[tuple[int, Event | StepTold | FaultInjected | None]] = (
            queue.SimpleQueue()
        )
        self._agents: dict[int, _Agent] = {}
        """Never changed in place (gRPC threads come and go): replaced, under `_agents_lock`."""
        self._agents_lock = threading.Lock()
        self._state = initial_state(spec.config, time.monotonic())
        self._history = HistoryWriter(spec.directory / HISTORY_FILE)
        self._tracer = RecoveryTracer()
        self._refusals = RefusalLedger()
        self._world_generation = 0
        self._committed: dict[int, int] = {}
        """The newest step of each member in the present world: what is told again is not written again."""
        self._shown_life_s = 0.0
        self._services = ServicePool(spec.service_command, spec.bind_host, self._service_ready)

    @property
    def generation(self) -> int:
        """The newest generation."""
        return self._state.generation

    # ---- called from gRPC threads ----

    def attach(self, first: pb.Envelope) -> queue.SimpleQueue[Any]:
        """Take in an agent's first message; returns its queue of commands. Raises WireError."""
        event = CONTROL_CODEC.decode(first.kind, first.body)
        if not isinstance(event, AgentAttached):
            raise WireError(f"an agent's first message must be AgentAttached, not {first.kind}")
        index = event.member
        if index != first.member or not 0 <= index < self._spec.config.num_members:
            what = "slice" if self._spec.config.hosts_per_slice == 1 else "host number"
            raise UnknownSenderError(f"there is no {what} {index} in this job, or it is not the sender's")
        outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        now = _now()
        agent = _Agent(outbox, event.data_address, now.mono_s, now.unix_s)
        with self._agents_lock:
            previous = self._agents.get(index)
            self._agents = {**self._agents, index: agent}
        if previous is not None:
            previous.outbox.put(CLOSED)
        self._inbox.put((index, event))
        return outbox

    def hear(self, member: int, outbox: queue.SimpleQueue[Any], envelope: pb.Envelope) -> None:
        """Take in one message of an attached agent."""
        agent = self._agents.get(member)
        if agent is None or agent.outbox is not outbox:
            return  # another agent of this host has taken over
        now = _now()
        agent.heard_mono_s, agent.heard_unix_s = now.mono_s, now.unix_s
        value = CONTROL_CODEC.decode(envelope.kind, envelope.body)
        if isinstance(value, RefusalsTold):
            sender = f"{self.name(member)}: {value.sender}"
            self.refuse(sender, value.reason, value.reason, surface=value.surface, num=value.num)
        elif not isinstance(value, Heartbeat):
            self._inbox.put((member, value))

    def detach(self, member: int, outbox: queue.SimpleQueue[Any]) -> None:
        """An agent's stream has ended."""
        outbox.put(CLOSED)
        with self._agents_lock:
            agent = self._agents.get(member)
            is_ours = agent is not None and agent.outbox is outbox
            if is_ours:
                self._agents = {index: a for index, a in self._agents.items() if index != member}
        if is_ours and agent is not None:
            self._inbox.put(
                (
                    member,
                    AgentLost(
                        member=member,
                        detector="agent-stream",
                        last_life_unix_s=agent.heard_unix_s,
                    ),
                )
            )

    def name(self, member: int) -> str:
        """A member for a sentence."""
        return self._spec.config.name(member)

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
        if record is not None and self._state.phase not in (Phase.COMPLETED, Phase.FAILED):
            self._history.write(record)

    def stop(self, reason: str) -> None:
        """End the job."""
        self._inbox.put((-1, StopRequested(reason=reason)))

    def status(self) -> bytes:
        """The job as JSON, for `elastic status`."""
        state = self._state
        spares = state.spares()
        return msgspec.json.encode(
            {
                "job_id": self._spec.job_id,
                "phase": state.phase.value,
                "generation": state.generation,
                "world": state.world_slices,
                "newest_committed": state.newest_committed,
                "refused": self._refusals.counts(),
                "newest_persisted": max((one.step for one in state.persisted), default=None),
                "persist_failed_step": None if state.persist_failed_step < 0 else state.persist_failed_step,
                "members": [
                    {
                        "slice": state.config.slice_of(member.index),
                        "host": state.config.host(member.index).host_index,
                        "spare": member.index in spares,
                        "attached": member.attached,
                        "worker": member.worker.value,
                        "pid": member.worker_pid,
                        "starts": member.starts,
                        "losses_in_row": member.losses_in_row,
                        "quarantined_for_s": remaining_s(member.quarantined_until_s, time.monotonic()),
                    }
                    for member in state.members
                ],
            }
        )

    # ---- the one thread that decides ----

    def run(self) -> int:
        """Decide until the job has ended; returns the exit status."""
        self._write_start()
        if self._spec.persist_root is not None:
            self._step(PersistedFound(snapshots=find_persisted(self._spec.persist_root)))
        tick_s = self._spec.heartbeat_s
        next_tick_s = time.monotonic()
        while self._state.phase not in (Phase.COMPLETED, Phase.FAILED):
            wait_s = max(next_tick_s - time.monotonic(), 0.0)
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=wait_s))
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + tick_s
                self._look_for_silent_agents()
                self._show_life()
                self._step(Tick())
        self._drain()
        self.close()
        return 0 if self._state.phase is Phase.COMPLETED else 1

    def close(self) -> None:
        """End the runtime services and close the history."""
        self._services.close()
        self._history.close()

    def _take(self, sender: int, event: Any) -> None:
        if isinstance(event, FaultInjected):
            self._history.write(event)
        elif isinstance(event, StepTold):
            self._note_commit(sender, event.record)
            record = event.record
            self._step(
                Committed(
                    member=sender,
                    generation=record.generation,
                    step=record.step,
                    checksums=event.checksums,
                    compile_s=record.compile_s,
                )
            )
        elif getattr(event, "member", sender) != sender and sender >= 0:
            reason = f"{type(event).__name__} in the name of another host"
            self.refuse(self.name(sender), reason, "unknown-sender")
        else:
            self._step(event)
            if isinstance(event, AgentAttached):
                self._tell_peers()

    def _note_commit(self, sender: int, record: StepCommitted) -> None:
        newest = self._committed.get(sender, -1)
        if record.generation == self._world_generation and record.step > newest:
            self._committed[sender] = record.step
            # Also while that world is being left: what it committed may be what the next one goes on from.
            self._history.write(record)
            self._tracer.hear(record)

    def _tell_peers(self) -> None:
        """Let every agent know where the others serve their shards."""
        addresses = {index: peer.data_address for index, peer in self._agents.items()}
        for index in addresses:
            self._send(Peers(member=index, addresses=addresses))

    def _step(self, event: Event) -> None:
        if self._state.phase is Phase.RUNNING:
            self._services.refill()
        self._state, commands = step(self._state, event, _now())
        for command in commands:
            if isinstance(command, Write):
                if isinstance(command.record, MessageRefused):
                    self._count_refused(command.record)
                    continue
                if isinstance(command.record, RunEnded):
                    self._write_rest_refused()
                if isinstance(command.record, WorldFormed):
                    self._world_generation = command.record.generation
                    self._committed.clear()
                self._history.write(command.record)
                self._tracer.hear(command.record)
            elif isinstance(command, StartService):
                self._services.start(command.generation, command.num_processes)
            else:
                self._send(command)

    def _write_rest_refused(self) -> None:
        for record in self._refusals.rest():
            self._history.write(record)

    def _send(self, command: Any) -> None:
        agent = self._agents.get(command.member)
        if isinstance(command, Stage | ComputeDigest):
            addresses = {index: peer.data_address for index, peer in self._agents.items()}
            command = replace(command, addresses=addresses)
        if agent is not None:
            name, body = CONTROL_CODEC.encode(command)
            envelope = pb.Envelope(
                generation=self._state.generation,
                member=command.member,
                kind=name,
                body=body,
            )
            agent.outbox.put(envelope)

    def _look_for_silent_agents(self) -> None:
        now_s = time.monotonic()
        for index, agent in self._agents.items():
            if now_s - agent.heard_mono_s > self._spec.agent_dead_s:
                self.detach(index, agent.outbox)

    def _show_life(self) -> None:
        """Let the agents hear that somebody decides: without that for `lease_s` they stop their workers."""
        now_s = time.monotonic()
        if now_s - self._shown_life_s < LIFE_EVERY_S:
            return
        self._shown_life_s = now_s
        name, body = CONTROL_CODEC.encode(Heartbeat(unix_s=time.time()))
        for index, agent in self._agents.items():
            agent.outbox.put(pb.Envelope(generation=self.generation, member=index, kind=name, body=body))

    def _service_ready(self, generation: int, address: str) -> None:
        self._inbox.put((-1, ServiceReady(generation=generation, address=address)))

    def _write_start(self) -> None:
        spec, config = self._spec, self._spec.config
        self._history.write(
            RunStarted(
                unix_s=time.time(),
                run_id=spec.job_id,
                adapter=spec.adapter,
                in_place=spec.in_place,
                simulated_faults=spec.simulated_faults,
                slices=config.num_slices,
                min_slices=config.min_slices,
                devices_per_host=config.devices_per_host,
                replicas=config.replicas,
                seed=spec.seed,
                target_steps=spec.target_steps,
                command=spec.command,
                hosts_per_slice=config.hosts_per_slice,
            )
        )

    def _drain(self) -> None:
        """Wait until every agent has closed its stream: its worker has ended, its memory is gone.

        After a completed job the workers may take their time (a last save); until then the runtime
        service lives.
        """
        patient = self._state.phase is Phase.COMPLETED
        bound_s = time.monotonic() + FAILED_DRAIN_S
        while self._agents and (patient or time.monotonic() < bound_s):
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=self._spec.heartbeat_s))  # an agent that comes late, say
            self._look_for_silent_agents()
            self._show_life()


def serve(directory: Path) -> int:
    """Run the coordinator of the job in `directory` to its end."""
    spec, token = load_job(directory), load_token(directory)
    coordinator = Coordinator(spec, token)
    server, address = make_server(
        coordinator, token, spec.config.num_members, bind_host=spec.bind_host, tls=spec.tls
    )
    server.start()
    watch_leash(lambda: os._exit(1))
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop("the coordinator was told to end"))
    write_place(directory, address, spec.tls)
    try:
        return coordinator.run()
    finally:
        server.stop(grace=0.2)


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1])))
