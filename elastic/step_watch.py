"""The step watchdog: how long a step may take, learned from the run's own steps, and who has not arrived.

Pure: the machine feeds it with commits, the moments of its clock and the workers' answers. In lockstep no
slice commits a step that another has not reached, so commits alone never tell who is missing. A worker whose
main thread waits in the runtime has arrived; one that is in the script's own code, or does not answer, has
not.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Literal

from elastic.detector_events import StacksTaken

KEPT = 64
"""Intervals from which the bound is learned."""
MEDIANS = 10.0
LONGEST = 3.0
"""A step may take so many times the median, and so many times the longest of those kept."""
LOOKS = 3
"""How often in a row the same slices must be missing before one is ended: who moves on is not hung."""
ANSWER_S = 5.0
"""How long a worker has for an answer. It comes from a thread of its own, in milliseconds."""
ALL_WAIT = 10.0
"""How many bounds to wait when all have arrived: a step of an odd length is likelier than a stuck network."""

Verdict = Literal["look again", "missing", "all in the script", "all arrived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWatch:
    """What is known of a world's progress. `intervals_s` lie between the commits of steps in a row, without
    those that compiled and without the first of a world; they outlive a world, all else does not.
    """

    generation: int = 0
    progress_s: float = 0.0
    """When the world began, or newly committed a step."""
    newest_step: int = -1
    num_committed: int = 0
    intervals_s: tuple[float, ...] = ()
    patience: float = 1.0
    """How many bounds to let pass before the next look."""
    asked_s: float | None = None
    answers: tuple[StacksTaken, ...] = ()
    missing: tuple[int, ...] | None = None
    """Who was missing at the last look of this row of looks."""
    looks: int = 0

    def restarted(self, generation: int, now_s: float) -> StepWatch:
        """The watch of a new world."""
        return StepWatch(generation=generation, progress_s=now_s, intervals_s=self.intervals_s)

    def committed(self, generation: int, step: int, now_s: float, compile_s: float) -> StepWatch:
        """A slice has committed a step of a world: the first one to do so counts, replayed steps too."""
        if generation != self.generation:
            return self.restarted(generation, now_s)._after_commit(step, now_s)
        if step <= self.newest_step:
            return self
        interval_s = now_s - self.progress_s
        kept = self.intervals_s
        if self.num_committed and compile_s < interval_s / 2:
            kept = (*kept, interval_s)[-KEPT:]
        return replace(self, intervals_s=kept)._after_commit(step, now_s)

    def _after_commit(self, step: int, now_s: float) -> StepWatch:
        return StepWatch(
            generation=self.generation,
            progress_s=now_s,
            newest_step=step,
            num_committed=self.num_committed + 1,
            intervals_s=self.intervals_s,
        )

    def bound_s(self, floor_s: float, first_step_s: float, patience: float = 1.0) -> float:
        """How long the world may go without a commit, times `patience`. Its first step may compile:
        `first_step_s` at least.
        """
        learned_s = 0.0
        if self.intervals_s:
            median_s = statistics.median(self.intervals_s)
            learned_s = max(MEDIANS * median_s, LONGEST * max(self.intervals_s))
        return max(patience * max(floor_s, learned_s), 0.0 if self.num_committed else first_step_s)

    def is_overdue(self, now_s: float, floor_s: float, first_step_s: float) -> bool:
        """Whether it is time to look where the workers are."""
        waited_s = now_s - self.progress_s
        return waited_s >= floor_s and waited_s >= self.bound_s(floor_s, first_step_s, self.patience)

    # ---- looking ----

    def asked(self, now_s: float) -> StepWatch:
        """All workers are being asked where they are."""
        return replace(self, asked_s=now_s, answers=())

    def answered(self, answer: StacksTaken) -> StepWatch:
        """A worker has answered; what nobody asked for changes nothing."""
        if self.asked_s is None:
            return self
        others = tuple(known for known in self.answers if known.member != answer.member)
        return replace(self, answers=(*others, answer))

    def is_answered(self, world: tuple[int, ...], now_s: float) -> bool:
        """Whether all have answered, or had the time to."""
        assert self.asked_s is not None
        there = {answer.member for answer in self.answers}
        return there >= set(world) or now_s - self.asked_s >= ANSWER_S

    def judge(self, world: tuple[int, ...]) -> tuple[StepWatch, Verdict]:
        """What the answers to this look say, with those of the looks before it."""
        arrived = {answer.member for answer in self.answers if not answer.in_script}
        missing = tuple(index for index in world if index not in arrived)
        if self.looks and missing != self.missing:
            return self.patient(2.0 * self.patience), "look again"  # they move: slow, not hung
        after = replace(self, missing=missing, looks=self.looks + 1)
        if after.looks < LOOKS:
            return after, "look again"
        if not missing:
            return after, "all arrived"
        return after, "all in the script" if len(missing) == len(world) else "missing"

    def patient(self, patience: float) -> StepWatch:
        """Let so many bounds pass before the next look."""
        return replace(self, patience=patience, asked_s=None, answers=(), missing=None, looks=0)

    def where(self, member: int) -> str:
        """What a worker answered, for people."""
        for answer in self.answers:
            if answer.member == member:
                return f"in the script, {answer.where}" if answer.in_script else f"waiting in {answer.where}"
        return f"no answer for {ANSWER_S:g} s"
