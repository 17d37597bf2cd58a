"""The fetching side of the data plane: boxes from one or several agents, straight into the caller's memory.

One thread for each source takes work from a shared queue (`snapshot.dataplane_work`). Bytes are received into
the place where they belong and hashed there. A connection that breaks is made again and goes on at the byte
where it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from reshard.boxes import Box, format_box
from reshard.errors import MissingShardError, RetryLaterError, UsageError
from snapshot.checksum import ByteBuffer
from snapshot.dataplane_hash import Hasher
from snapshot.dataplane_parts import Goal
from snapshot.dataplane_source import Source
from snapshot.dataplane_wire import parse_address
from snapshot.dataplane_work import Work
from snapshot.tls import TlsFiles

LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A box to fetch into `into`: a stored shard of the snapshot or a piece of one, elements in C order.

    `sources` are the addresses of agents that should have it. `into` is writable, C-contiguous and of the
    box's size in bytes.
    """

    path: str
    box: Box
    sources: tuple[str, ...]
    into: ByteBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a fetch did: `checksums` are those of the boxes, in the order asked.

    `bytes_from` are the bytes each source sent, with those that had to be sent again; `num_reconnects` says
    how often a broken connection was made anew, `num_taken_over` how often a slow source's work went to
    another.
    """

    checksums: tuple[int, ...]
    bytes_from: dict[str, int]
    num_reconnects: int
    num_taken_over: int
    rejected: tuple[str, ...] = ()


def fetch(
    wants: Sequence[Wanted],
    *,
    token: str,
    generation: int,
    step: int,
    deadline_s: float,
    of_generation: int | None = None,
    tls: TlsFiles | None = None,
    await_capture: bool = False,
    given_up: threading.Event | None = None,
) -> Fetched:
    """Fetch boxes of the snapshot of `step`, captured in `of_generation` (None: any), verified.

    Sources that cannot be reached are tried again, and with `await_capture` those that have not captured the
    step yet asked again, for at most `deadline_s`. Raises RetryLaterError then; NotCapturedYetError (one of
    those) at once without `await_capture`; OverwrittenError or MissingShardError when no source has a box
    (any more); CorruptCopyError when copies or transfers are damaged; UsageError for a wrong token, a stale
    generation, or TLS that does not fit. After an error the buffers hold anything; nobody writes to them any
    more.
    """
    goals = [_goal(want, step) for want in wants]
    addresses = sorted({address for want in wants for address in want.sources})
    work = Work(goals, addresses)
    context = None if tls is None else tls.client_context()
    hasher = Hasher(work.judge)
    sources = [
        Source(address, token, context, work, hasher, (generation, step, of_generation), await_capture)
        for address in addresses
    ]
    try:
        for source in sources:
            source.thread.start()
        if not _wait_over(work, deadline_s, given_up):
            reasons = "; ".join(source.describe() for source in sources)
            work.fail(RetryLaterError(f"not fetched within {deadline_s:g} s: {reasons}", step=step))
    finally:
        work.fail(RetryLaterError("the fetch was given up"))
        for source in sources:
            source.stop()
        hasher.close()
    if work.error is not None:
        raise work.error
    return Fetched(
        checksums=tuple(goal.digest for goal in goals),
        bytes_from=work.bytes_from,
        num_reconnects=sum(max(0, source.num_connections - 1) for source in sources),
        num_taken_over=work.num_taken_over,
        rejected=tuple(dict.fromkeys(error.message for goal in goals for error in goal.errors)),
    )


def _wait_over(work: Work, deadline_s: float, given_up: threading.Event | None) -> bool:
    if given_up is None:
        return work.over.wait(deadline_s)
    until_s = time.monotonic() + deadline_s
    while not work.over.wait(LOOK_EVERY_S) and not given_up.is_set():
        if time.monotonic() >= until_s:
            return False
    return True


def _goal(want: Wanted, step: int) -> Goal:
    if not want.sources:
        raise MissingShardError(want.path, want.box, step)
    for address in want.sources:
        parse_address(address)
    view = memoryview(cast("bytes", want.into))
    if view.readonly or not view.c_contiguous:
        what = f"the buffer for {want.path!r} {format_box(want.box)}"
        raise UsageError(f"{what} must be writable and C-contiguous", path=want.path, box=want.box)
    flat = view.cast("B") if view.nbytes else memoryview(bytearray())
    return Goal(want.path, want.box, flat, list(dict.fromkeys(want.sources)))
