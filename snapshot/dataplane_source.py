"""One agent that is fetched from: its connection, and the thread that takes work for it.

Bytes are received into the place where they belong, and hashed there. After a break the connection is made
anew and goes on at the byte where it was.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

import tenacity

from reshard.boxes import format_box
from reshard.errors import ElasticError, RetryLaterError, UsageError
from snapshot.checksum import checksum
from snapshot.dataplane_auth import HANDSHAKE_S, authenticate
from snapshot.dataplane_errors import NotCapturedYetError, explain
from snapshot.dataplane_hash import Hasher
from snapshot.dataplane_parts import Part
from snapshot.dataplane_wire import (
    Covers,
    ReadRequest,
    Status,
    WantedRange,
    is_loopback,
    parse_address,
    receive,
    receive_head,
    receive_some,
    receive_trailer,
    send_request,
    set_timeout,
    tune,
)
from snapshot.dataplane_work import Work

BLOCK_BYTES = 1 << 20
"""Received and hashed at a time."""
SMALL_BYTES = 1 << 20
"""Boxes up to this size are hashed where they were received, in one go."""
SILENT_S = 10.0
"""How long a source may send nothing before its connection is made anew."""
ASK_AGAIN_S = 0.02
"""How long after a peer had not captured a step it is asked again, if we were told to wait for it."""

_RETRY_WAIT = tenacity.wait_random_exponential(multiplier=0.02, max=0.5)


class Source:
    """One agent that is fetched from, and the thread that does so."""

    def __init__(
        self,
        address: str,
        token: str,
        context: ssl.SSLContext | None,
        work: Work,
        hasher: Hasher,
        snapshot: tuple[int, int, int | None],
        await_capture: bool,
    ) -> None:
        self.address = address
        self.num_connections = 0
        self.thread = threading.Thread(target=self._run, name=f"fetch {address}", daemon=True)
        self._token = token.encode()
        self._context = context
        self._work = work
        self._hasher = hasher
        self._generation, self._step, self._of_generation = snapshot
        self._await_capture = await_capture
        self._connection: socket.socket | None = None
        self._trouble = ""

    def describe(self) -> str:
        """Say how it stands with this source."""
        return f"agent at {self.address}: {self._trouble or 'has not sent all'}"

    def cut(self) -> None:
        """Break the connection; the thread notices at once."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def stop(self) -> None:
        """Break off and wait for the thread; the work is over."""
        while self.thread.is_alive():
            self.cut()  # again, as it may just have been connecting
            self.thread.join(0.02)

    def _run(self) -> None:
        over = self._work.over
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((OSError, RetryLaterError)),
            stop=tenacity.stop_when_event_set(over),
            wait=_RETRY_WAIT,
            sleep=tenacity.sleep_using_event(over),
            reraise=True,
        )
        try:
            retrying(self._session)
        except ElasticError as error:
            self._work.lose_source(self.address, error)
        except OSError:
            pass  # the work is over
        except BaseException as error:
            self._work.fail(ElasticError(f"fetching from {self.address} failed: {error!r}"))
            raise

    def _session(self) -> None:
        """Fetch over one connection until there is nothing left for this source."""
        if self._work.over.is_set():
            return
        try:
            self._connect()
            self.num_connections += 1
            while batch := self._work.take(self.address, self.cut):
                self._fetch(batch)
        except (OSError, RetryLaterError) as error:
            self._trouble = str(error)
            if isinstance(error, ssl.SSLError) and not isinstance(
                error, ssl.SSLEOFError | ssl.SSLZeroReturnError
            ):
                raise UsageError(
                    f"agent at {self.address}: TLS: {error.reason}",
                    remedy="Give all agents TLS files of the same job, or none.",
                    address=self.address,
                ) from error
            raise
        finally:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            self._work.give_back(self.address)

    def _connect(self) -> None:
        host, port = parse_address(self.address)
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        plain = self._connection = socket.socket(family, kind, protocol)
        tune(plain, loopback=is_loopback(str(target[0])))
        set_timeout(plain, HANDSHAKE_S)
        try:
            plain.connect(target)
        except BlockingIOError:
            raise TimeoutError("it does not answer") from None
        if self._context is not None:
            plain.settimeout(HANDSHAKE_S)
            self._connection = self._context.wrap_socket(plain, do_handshake_on_connect=False)
            self._connection.do_handshake()
        authenticate(self._connection, self._token, self.address)
        set_timeout(self._connection, SILENT_S)

    def _fetch(self, batch: list[Part]) -> None:
        assert self._connection is not None
        wants = tuple(
            WantedRange(
                path=part.goal.path,
                box=part.goal.box,
                start=part.start,
                stop=part.stop,
                skip=part.done_bytes,
                verify=part.goal.verify,
            )
            for part in batch
        )
        send_request(
            self._connection,
            ReadRequest(
                generation=self._generation, step=self._step, of_generation=self._of_generation, wants=wants
            ),
        )
        is_early = False
        for part in batch:
            is_early |= self._fetch_part(self._connection, part)
        self._work.release(self.address)
        if is_early:
            self._trouble = f"has not captured step {self._step} yet"
            self._work.over.wait(ASK_AGAIN_S)

    def _fetch_part(self, connection: socket.socket, part: Part) -> bool:
        """Receive one part; return whether its source was asked too early, and is to be asked again."""
        goal = part.goal
        status, covers, text_bytes, box_bytes = receive_head(connection)
        if status != Status.OK:
            return self._refused(part, status, receive(connection, text_bytes).decode(errors="replace"))
        if box_bytes != goal.view.nbytes:
            what = (
                f"{goal.path!r} {format_box(goal.box)} has {box_bytes} bytes, the buffer {goal.view.nbytes}"
            )
            raise UsageError(f"agent at {self.address}: {what}", path=goal.path, box=goal.box)
        self._receive(connection, part)
        status, digest = receive_trailer(connection)
        expected: int | None = digest
        if status != Status.OK:
            error = explain(Status.OVERWRITTEN, "", self.address, goal.path, goal.box, self._step)
            self._work.refuse(part, error, spoilt=True)
            return False
        is_whole = (part.start, part.stop) == (0, goal.view.nbytes)
        if covers == Covers.RANGE and not is_whole:
            if checksum(goal.view[part.start : part.stop]) != digest:
                self._work.mismatch(part)
                return False
            expected = None
        if self._work.finish(part, expected):
            if goal.view.nbytes <= SMALL_BYTES:
                self._work.judge(goal, part.round, checksum(goal.view))
            else:
                self._hasher.finish(goal, part.round)
        return False

    def _receive(self, connection: socket.socket, part: Part) -> None:
        goal, is_small = part.goal, part.goal.view.nbytes <= SMALL_BYTES
        while part.left_bytes:
            at = part.start + part.done_bytes
            block = goal.view[at : min(at + BLOCK_BYTES, part.stop)]
            filled_bytes = 0
            try:
                while filled_bytes < len(block):  # one call fills it, except under TLS
                    filled_bytes += receive_some(connection, block[filled_bytes:])
            finally:
                part.done_bytes += filled_bytes
                self._work.arrived(self.address, filled_bytes)
                if filled_bytes and not is_small:
                    self._hasher.add(goal, part.round, at, at + filled_bytes)

    def _refused(self, part: Part, status: int, text: str) -> bool:
        error = explain(status, text, self.address, part.goal.path, part.goal.box, self._step)
        if status == Status.STALE:
            raise error
        if isinstance(error, NotCapturedYetError) and self._await_capture:
            self._work.put_back(part)
            return True
        self._work.refuse(part, error)
        return False
