"""The agent's stream to the coordinator: attached again when it breaks, with growing pauses."""

from __future__ import annotations

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
from elastic.job import JobSpec
from elastic.protocol import CONTROL_CODEC, Heartbeat
from elastic.wire import WireError
from reshard.errors import RetryLaterError

FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 2.0
MUTE_S = 5.0
"""A coordinator shows life every 2 s; one that has not for so long is connected to anew."""


class StreamLost:
    """The stream has broken: attach again."""


class CoordinatorStream:
    """Sends events and hands commands to `on_item`; after a break `on_item` gets a StreamLost."""

    def __init__(self, spec: JobSpec, token: str, slice_index: int, on_item: Callable[[Any], None]) -> None:
        self._spec = spec
        self._metadata = bearer(token)
        self._slice = slice_index
        self._on_item = on_item
        self._outbox: queue.SimpleQueue[pb.Envelope | None] = queue.SimpleQueue()
        self._channel: grpc.Channel | None = None
        self.heard_s = time.monotonic()
        self._failures = 0
        self._attached_s = self.heard_s
        self.is_attached = False
        self.job_ended = False

    def attach(self, generation: int, first: Any) -> None:
        """Connect (trying for `lease_s`) and say who we are. Raises RetryLaterError when there is no
        coordinator.
        """
        self.close()
        self._attached_s = time.monotonic()
        outbox: queue.SimpleQueue[pb.Envelope | None] = queue.SimpleQueue()
        outbox.put(self._envelope(generation, first))  # before anything that another thread sends
        self._outbox = outbox
        self._channel = open_channel(self._place(), self._spec.tls, max_reply_bytes=-1)
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

    def _envelope(self, generation: int, event: Any) -> pb.Envelope:
        name, body = CONTROL_CODEC.encode(event)
        return pb.Envelope(generation=generation, slice_index=self._slice, kind=name, body=body)

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

    def _read(self, replies: Iterator[pb.Envelope], outbox: Any) -> None:
        try:
            for envelope in replies:
                command = CONTROL_CODEC.decode(envelope.kind, envelope.body)
                self.heard_s = time.monotonic()
                self._failures = 0
                if isinstance(command, Heartbeat):
                    continue
                self.job_ended = self.job_ended or isinstance(command, Shutdown)
                self._on_item(command)
        except (grpc.RpcError, WireError):
            pass  # a broken stream and an unreadable one have the same remedy: attach again
        if outbox is self._outbox and not self.job_ended:
            self._failures += 1
            time.sleep(min(FIRST_PAUSE_S * 2**self._failures, MAX_PAUSE_S))
            self._on_item(StreamLost())

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
