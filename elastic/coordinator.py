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
from elastic.control_server import make_server
from elastic.coordinator_desk import OVER, FrontDesk
from elastic.coordinator_log import Entry
from elastic.coordinator_place import KeptPlace
from elastic.coordinator_records import run_started, started_record
from elastic.events import (
    AgentAttached,
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
from elastic.runtime_service import ServicePool
from elastic.saved_state import restore
from elastic.shadow_events import EndShadowService, ShadowServiceReady, StartShadowService
from elastic.shadow_service import ShadowService
from elastic.turn import Clock

LIFE_EVERY_S = 2.0
FAILED_DRAIN_S = 3.0


def _now() -> Clock:
    return Clock(mono_s=time.monotonic(), unix_s=time.time())


def end_fenced(error: FencedError) -> None:
    """End this process at once: another coordinator may command already."""
    print(f"elastic: this coordinator ends: {error.message}", file=sys.stderr, flush=True)
    os._exit(FENCED_EXIT_STATUS)


class Coordinator(FrontDesk):
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
        super().__init__(spec, mandate or FreeMandate(), on_fenced)
        self._token = token
        self._shown_life_s = 0.0
        self._comers_until_s = 0.0
        """Until when agents may come that have not heard from the coordinator before that the job is over."""
        self._services = ServicePool(
            spec.service_command, spec.bind_host, self._service_ready, self._service_lost
        )

        self._shadow = ShadowService(
            spec.service_command, spec.bind_host, self._shadow_ready, self._shadow_failed
        )

    # ---- the one thread that decides ----

    def run(self) -> int:
        """Decide until the job has ended; returns the exit status. Raises FencedError."""
        self._begin()
        tick_s = self._spec.heartbeat_s
        next_tick_s = time.monotonic()
        while self._state.phase not in OVER:
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
        if self._state.phase in OVER:
            self._comers_until_s = now.mono_s + self._spec.config.timing.agent_grace_s
        self._perform(commands)

    def _take(self, sender: int, event: Any) -> None:
        self._mandate.check()
        if isinstance(event, FaultInjected):
            self._write(event)
        elif isinstance(event, StepTold):
            self._hear_commit(sender, event)
        elif getattr(event, "member", sender) != sender and sender >= 0:
            reason = f"{type(event).__name__} in the name of another host"
            self.refuse(self.name(sender), reason, "unknown-sender")
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
            if not told.is_found:  # how long it took is not known
                self._look_for_stragglers(record)
        elif told.is_found:
            return
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
        while time.monotonic() < self._comers_until_s or (
            len(self._roster) and (patient or time.monotonic() < bound_s)
        ):
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=self._spec.heartbeat_s))  # an agent that comes late, say
            self._look_for_silent_agents()
            self._show_life()


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
    place = KeptPlace(spec, address, mandate)
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
