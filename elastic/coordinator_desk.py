"""What a coordinator's gRPC threads do: they take messages in, and put events into the queue of the one
thread that decides.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from elastic import control_pb2 as pb
from elastic.arbiter import FencedError
from elastic.control_server import UnknownSenderError
from elastic.coordinator_log import CoordinatorLog
from elastic.coordinator_status import describe_job
from elastic.events import AgentAttached, AgentLost, Event, Phase, StopRequested
from elastic.job import JobSpec
from elastic.mandate import Mandate
from elastic.protocol import CONTROL_CODEC, Heartbeat, StepTold
from elastic.records import FaultInjected, MessageRefused
from elastic.refusals import RefusalLedger, RefusalsTold, Surface
from elastic.roster import Outbox, Roster
from elastic.state import initial_state
from elastic.stragglers import StragglerWatch
from elastic.telemetry import RecoveryTracer
from elastic.wire import WireError

OVER = (Phase.COMPLETED, Phase.FAILED)


class FrontDesk:
    """See `elastic.control_server.Desk`. `on_fenced` is called when a caller shows that this coordinator may
    not decide any more.
    """

    def __init__(self, spec: JobSpec, mandate: Mandate, on_fenced: Callable[[FencedError], None]) -> None:
        self._spec = spec
        self._mandate = mandate
        self._on_fenced = on_fenced
        self._inbox: queue.SimpleQueue[tuple[int, Event | StepTold | FaultInjected | None]] = (
            queue.SimpleQueue()
        )
        self._roster = Roster()
        self._state = initial_state(spec.config, time.monotonic())
        self._log = CoordinatorLog(
            spec.directory,
            mandate.epoch,
            mandate.check,
            is_shared=spec.arbiter is not None,
            hosts_per_slice=spec.config.hosts_per_slice,
        )
        self._tracer = RecoveryTracer()
        self._stragglers = StragglerWatch(
            rule=spec.config.stragglers, hosts_per_slice=spec.config.hosts_per_slice
        )
        self._refusals = RefusalLedger()

    @property
    def generation(self) -> int:
        """The newest generation."""
        return self._state.generation

    def attach(self, first: pb.Envelope) -> Outbox:
        """Take in an agent's first message; returns its queue of commands. Raises WireError."""
        self._check_epoch(first)
        event = CONTROL_CODEC.decode(first.kind, first.body)
        if not isinstance(event, AgentAttached):
            raise WireError(f"an agent's first message must be AgentAttached, not {first.kind}")
        index = event.member
        if index != first.member or not 0 <= index < self._spec.config.num_members:
            what = "slice" if self._spec.config.hosts_per_slice == 1 else "host number"
            raise UnknownSenderError(f"there is no {what} {index} in this job, or it is not the sender's")
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
            sender = f"{self.name(member)}: {value.sender}"
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
        if record is not None and self._state.phase not in OVER and self._mandate.is_valid:
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
                f"the agent of {self.name(envelope.member)} has heard from a coordinator of epoch"
                f" {envelope.epoch}, this is epoch {self._mandate.epoch}"
            )
            self._fence()

    def _fence(self) -> None:
        try:
            self._mandate.check()
        except FencedError as error:
            self._on_fenced(error)
