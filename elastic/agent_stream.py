"""The agent's stream to the coordinator: attached again when it breaks, with growing pauses, and at once when
the run's directory names another coordinator.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import tenacity

from elastic import control_pb2 as pb
from elastic.control_channel import CoordinatorPlace, bearer, open_channel, read_place
from elastic.control_pb2_grpc import ControlStub
from elastic.events import Shutdown
from elastic.job import COORDINATOR_FILE, JobSpec
from elastic.pauses import pause_s
from elastic.protocol import CONTROL_CODEC, Heartbeat
from elastic.wire import WireError
from reshard.errors import ElasticError, RetryLaterError

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
_PAUSES = tenacity.wait_random_exponential(multiplier=FIRST_PAUSE_S, max=MAX_PAUSE_S)
STALE = "stale-epoch"
MUTE_S = 5.0
"""A coordinator shows life every 2 s; one that has not for so long is connected to anew."""


class StreamLost:
    """The stream has broken: attach again."""


class CoordinatorStream:
    """Sends events and hands commands to `on_item`; after a break `on_item` gets a StreamLost.

    Remembers the highest epoch of a coordinator that it has seen: what comes with a lower one is refused,
    which `on_refused` hears.
    """

    def __init__(
        self,
        spec: JobSpec,
        token: str,
        member: int,
        on_item: Callable[[Any], None],
        on_refused: Callable[[str], None] = lambda sender: None,
    ) -> None:
        self._spec = spec
        self._metadata = bearer(token)
        self._member = member
        self._on_item = on_item
        self._on_refused = on_refused
        self._outbox: queue.SimpleQueue[pb.Envelope | None] = queue.SimpleQueue()
        self._channel: grpc.Channel | None = None
        self._at: CoordinatorPlace | None = None
        self._looked: tuple[int, int] = (0, 0)
        self.heard_s = time.monotonic()
        self._failures = 0
        self._attached_s = self.heard_s
        self.epoch = 0
        self.is_attached = False
        self.job_ended = False

    def attach(self, generation: int, first: Any) -> None:
        """Connect (trying for `lease_s`) and say who we are. Raises RetryLaterError when there is no
        coordinator.
        """
        self.close()
        self._attached_s = time.monotonic()
        place = self._at = self._place()
        self.epoch = max(self.epoch, place.epoch)
        outbox: queue.SimpleQueue[pb.Envelope | None] = queue.SimpleQueue()
        outbox.put(self._envelope(generation, first))  # before anything that another thread sends
        self._outbox = outbox
        self._channel = open_channel(place, self._spec.tls, max_reply_bytes=-1)
        replies = ControlStub(self._channel).Attach(
            _drain(outbox), metadata=self._metadata, wait_for_ready=True
        )
        self.is_attached = True
        threading.Thread(target=self._read, args=(replies, outbox), daemon=True).start()

    def send(self, generation: int, event: Any) -> None:
        """Send one event; it is dropped if the stream is broken (what matters is told again when
        attaching).
        """
        self._outbox.put(self._envelope(generation, event))

    def is_elsewhere(self) -> bool:
        """Whether the run's directory names another coordinator by now than the one attached to; cheap."""
        with contextlib.suppress(OSError, ElasticError):
            stat = (self._spec.directory / COORDINATOR_FILE).stat()
            looked, self._looked = self._looked, (stat.st_ino, stat.st_mtime_ns)
            if looked != self._looked:
                return read_place(self._spec.directory) != self._at
        return False

    def is_mute(self) -> bool:
        """Whether nothing has come for so long, over a stream that is that old, that it counts as broken."""
        return self.is_attached and time.monotonic() - max(self.heard_s, self._attached_s) > MUTE_S

    def is_silent_for(self, lease_s: float) -> bool:
        """Whether nothing was heard from the coordinator for so long."""
        return time.monotonic() - self.heard_s > lease_s

    def close(self) -> None:
        """End the stream after what was sent."""
        self.is_attached = False
        self._outbox.put(None)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _envelope(self, generation: int, event: Any) -> pb.Envelope:
        name, body = CONTROL_CODEC.encode(event)
        return pb.Envelope(generation=generation, member=self._member, kind=name, body=body, epoch=self.epoch)

    def _read(self, replies: Iterator[pb.Envelope], outbox: Any) -> None:
        try:
            for envelope in replies:
                if outbox is not self._outbox:
                    return  # another stream has taken its place: it tells all that counts
                if envelope.epoch < self.epoch:
                    self._on_refused(f"the coordinator of epoch {envelope.epoch}")
                    break
                self.epoch = envelope.epoch
                self._take(CONTROL_CODEC.decode(envelope.kind, envelope.body))
        except (grpc.RpcError, WireError):
            pass  # a broken stream and an unreadable one have the same remedy: attach again
        if outbox is self._outbox and not self.job_ended:
            self._failures += 1
            time.sleep(pause_s(_PAUSES, self._failures))
            if outbox is self._outbox:
                self._on_item(StreamLost())

    def _take(self, command: Any) -> None:
        self.heard_s = time.monotonic()
        self._failures = 0
        if not isinstance(command, Heartbeat):
            self.job_ended = self.job_ended or isinstance(command, Shutdown)
            self._on_item(command)

    def _place(self) -> CoordinatorPlace:
        directory = self._spec.directory
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(OSError),
            stop=tenacity.stop_after_delay(self._spec.lease_s),
            wait=tenacity.wait_exponential(multiplier=0.02, max=0.5),
            reraise=True,
        )
        try:
            place: CoordinatorPlace = retrying(read_place, directory)
        except OSError as error:
            raise RetryLaterError(f"no coordinator has written its address into {directory}") from error
        return place


def _drain(outbox: queue.SimpleQueue[pb.Envelope | None]) -> Iterator[pb.Envelope]:
    while (envelope := outbox.get()) is not None:
        yield envelope
