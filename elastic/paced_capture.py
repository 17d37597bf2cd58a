"""Captures of one world at its cadence: when to, what they cost, and what the processes agree on for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax

from elastic.agreement import Agreement
from elastic.cadence import Cadence, Measured, next_interval
from elastic.copy_reports import CopyReports
from elastic.pace import Decision, Pace
from elastic.ports import Link, WorldLost
from snapshot.capture import Capturer, CaptureStats

COPIES_BOUND_S = 30.0
"""How long the last step of a run waits for the copies of the snapshot before it."""
LOOK_EVERY_S = 0.005


class OverlappingCapturer(Protocol):
    """A capturer with `overlaps` set: its transfers run while the loop goes on; one capture at a time."""

    @property
    def in_flight(self) -> bool:
        """Whether a capture that was started is not complete yet; `finish` would wait."""
        ...

    def start(self, state: Any, *, step: int, generation: int, position: int) -> object:
        """Start to capture; when this returns, the state may be donated."""
        ...

    def finish(self) -> CaptureStats | None:
        """Wait until the capture that was started is complete; None when none was."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """What became of the snapshot of a step: how long the loop was held for it, what was completed (0
    bytes: nothing), whether it was due and left out, and the steps from one capture to the next.
    """

    stall_s: float
    captured_bytes: int
    skipped: bool
    interval_steps: int


class PacedCapture:
    """Captures the state of one world with `capturers`, those of this process's hosts.

    `devices` are the world's, in the same order in every process. What was captured is told to `copies`.
    """

    def __init__(
        self,
        cadence: Cadence,
        capturers: Sequence[Capturer],
        devices: Sequence[jax.Device],
        link: Link,
        generation: int,
        copies: CopyReports | None = None,
        *,
        restored_step: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cadence = cadence
        self._capturers = tuple(capturers)
        self._link = link
        self._generation = generation
        self._copies = copies
        self._clock = clock
        self._measured = Measured()
        self._overlaps = bool(capturers) and all(
            getattr(capturer, "overlaps", False) for capturer in capturers
        )
        self._in_flight_step: int | None = None
        self._finished_step = -1
        self._pace = Pace(
            cadence,
            captured_step=restored_step,
            needs_copies=self._overlaps or link.replicated_step(generation) is not None,
        )
        self._agreement: Agreement | None = None
        if self._pace.needs_agreement:
            self._agreement = Agreement(devices, width=2)
            self._propose()  # also compiles the program and connects, before the first step

    def capture(self, state: Any, step: int, position: int) -> int:
        """Capture now and to the end; returns the bytes."""
        stats = [
            capturer.capture(state, step=step, generation=self._generation, position=position)
            for capturer in self._capturers
        ]
        self._audit(state, step)
        return self._finished(step, stats)

    def after_step(
        self,
        state: Any,
        step: int,
        position: int,
        *,
        num_steps: int | None,
        is_leaving: bool,
        work_s: float,
        compile_s: float = 0.0,
    ) -> Paced:
        """Capture the state after `step` if it is its turn.

        `num_steps` are those of the run, where known; with `is_leaving` this process leaves the world now.
        `work_s` is how long the step took since the commit before, `compile_s` of it for compiling.
        Raises what `Capturer.capture` raises, JaxRuntimeError when a peer was lost, WorldLost.
        """
        began_s = self._clock()
        self._measured = self._measured.after_step(self._cadence, work_s, compile_s=compile_s)
        is_last = num_steps is not None and step + 1 >= num_steps
        captured_bytes = 0 if self._is_in_flight() and not is_last else self.finish()
        self.settle()
        if is_last and not self._pace.is_copied:
            self._wait_for_copies()
        decision = self._pace.decide(step, num_steps)
        leaves_with = is_leaving and self._pace.is_copied
        if decision is Decision.CAPTURE or leaves_with:
            is_first = self._pace.captured_step is None  # a committed step is never without a snapshot
            if self._overlaps and not (is_first or is_last or is_leaving):
                self._start(state, step, position)
            else:
                captured_bytes += self.capture(state, step, position)
            self._measured = self._measured.after_capture(self._cadence, self._clock() - began_s)
            held_s = self._clock()
        else:
            held_s = began_s
        if decision is Decision.CAPTURE:
            self._pace.captured(step)
        if not is_last and self._pace.must_propose(step):
            self._propose()
        ended_s = self._clock()
        self._measured = self._measured.after_stall(self._cadence, ended_s - held_s)
        return Paced(
            stall_s=ended_s - began_s,
            captured_bytes=captured_bytes,
            skipped=decision is Decision.SKIP and not leaves_with,
            interval_steps=self._pace.interval_steps,
        )

    def finish(self) -> int:
        """Wait until a capture that was started is complete; returns its bytes (0: none was)."""
        if self._in_flight_step is None:
            return 0
        step, self._in_flight_step = self._in_flight_step, None
        return self._finished(step, [capturer.finish() for capturer in self._overlapping()])

    def settle(self) -> None:
        """Take in what was agreed on, if anything. Raises JaxRuntimeError when a peer was lost."""
        if self._agreement is not None and self._agreement.is_pending:
            interval_steps, uncopied = self._agreement.read()
            self._pace.agree(interval_steps, -uncopied)

    def _start(self, state: Any, step: int, position: int) -> None:
        for capturer in self._overlapping():
            capturer.start(state, step=step, generation=self._generation, position=position)
        self._in_flight_step = step
        self._audit(state, step)

    def _finished(self, step: int, stats: Sequence[CaptureStats | None]) -> int:
        """Captures are complete: tell their checksums; returns the bytes."""
        self._finished_step = step
        captured_bytes = 0
        for capturer, one in zip(self._capturers, stats, strict=True):
            if one is not None:
                captured_bytes += one.captured_bytes
                if self._copies is not None:
                    self._copies.tell(capturer.static.host, one)
        return captured_bytes

    def _audit(self, state: Any, step: int) -> None:
        if self._copies is not None:
            self._copies.audit_if_due(state, step)

    def _is_in_flight(self) -> bool:
        return self._in_flight_step is not None and any(
            capturer.in_flight for capturer in self._overlapping()
        )

    def _overlapping(self) -> tuple[OverlappingCapturer, ...]:
        return cast(tuple[OverlappingCapturer, ...], self._capturers)

    def _propose(self) -> None:
        assert self._agreement is not None
        wanted = next_interval(self._cadence, self._measured, self._pace.interval_steps)
        self._agreement.propose((wanted, -self._copied_step()))

    def _copied_step(self) -> int:
        """The newest step that is complete in this process's memory, and copied to where it belongs."""
        replicated_step = self._link.replicated_step(self._generation)
        return self._finished_step if replicated_step is None else min(self._finished_step, replicated_step)

    def _wait_for_copies(self) -> None:
        """Before the last capture, within a bound: for all hosts' copies of the snapshot before it."""
        newest = self._pace.captured_step
        until_s = self._clock() + COPIES_BOUND_S
        while newest is not None and self._copied_step() < newest:
            if self._link.is_fenced(self._generation):
                raise WorldLost(f"world {self._generation} was given up")
            if self._clock() >= until_s:
                break
            time.sleep(LOOK_EVERY_S)
        self._propose()
        self.settle()
