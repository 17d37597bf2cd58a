"""Which execution of each step is in the final state: the lineage of a run, traced through its history.

A *commit* is a StepCommitted of a world that trains (commits of a rehearsal do not count). All commits of one
step in one generation are one *execution*. A world formed after the first one goes on from `restored_step`,
so it rolls back every execution beyond that step; a failed run is rolled back to the snapshot that was left
at its end, where the history tells which. What was not rolled back is *effective*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic.records import LossDetected, Record, RunEnded, StepCommitted, WorldFormed

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One step run by one generation, as its slices' commits describe it. Times are of its first."""

    generation: int
    step: int
    commits: tuple[StepCommitted, ...]

    @property
    def unix_s(self) -> float:
        """When its first commit was seen."""
        return self.commits[0].unix_s

    @property
    def position(self) -> int:
        """The place in the stream at which its batch starts."""
        return self._journalled.position

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """The samples that the first journal with an entry has; none when no journal was read in time."""
        return self._journalled.sample_ids

    @property
    def _journalled(self) -> StepCommitted:
        return next((commit for commit in self.commits if commit.sample_ids), self.commits[0])

    @property
    def end_position(self) -> int:
        """The place after its last sample."""
        return self.position + len(self.sample_ids)

    @property
    def loss(self) -> float | None:
        """The first loss that a slice told."""
        return next((commit.loss for commit in self.commits if commit.loss is not None), None)

    @property
    def stall_s(self) -> float:
        """The longest that the capture held a worker."""
        return max(commit.stall_s for commit in self.commits)

    @property
    def compile_s(self) -> float:
        """The longest that a worker spent compiling."""
        return max(commit.compile_s for commit in self.commits)

    def same_samples(self, other: Execution) -> bool:
        """Whether both used the same samples, in whatever order."""
        return sorted(self.sample_ids) == sorted(other.sample_ids)


@dataclass(slots=True, kw_only=True)
class Lineage:
    """The effective executions by step, and what happened to the others."""

    executions: dict[Key, Execution]
    effective: dict[int, Execution] = field(default_factory=dict)
    rolled_back: list[Execution] = field(default_factory=list)
    doubled: dict[Key, Execution] = field(default_factory=dict)
    """Executions that are in the final state besides the effective one of their step: applied twice."""
    stale: list[StepCommitted] = field(default_factory=list)
    """Commits of a generation after a newer one had been formed, or of one that never was."""
    unseen: set[int] = field(default_factory=set)
    """Steps inside a restored state of which the history has no commit."""
    first_step: int | None = None
    """The step the run had to begin with, where the history tells."""
    started_fresh: bool = True
    end_known: bool = False
    """Whether the history tells what state was left at the end."""

    @property
    def applied(self) -> list[Execution]:
        """All executions whose effect is in the final state, in the order of their steps."""
        return sorted(
            [*self.effective.values(), *self.doubled.values()], key=lambda execution: execution.step
        )

    @property
    def replayed(self) -> set[int]:
        """Steps rolled back and then committed again with the same samples."""
        return {old.step for old in self.rolled_back if self._is_replayed(old)}

    @property
    def lost(self) -> set[int]:
        """Steps committed once that are neither in the final state nor replayed, and steps passed over."""
        kept = self.effective.keys() | self.unseen
        lost = {
            old.step for old in self.rolled_back if old.step not in self.unseen and not self._is_replayed(old)
        }
        if kept:
            first = min(kept) if self.first_step is None else self.first_step
            lost |= set(range(first, max(kept))) - kept
        return lost

    def _is_replayed(self, old: Execution) -> bool:
        new = self.effective.get(old.step)
        return new is not None and new.same_samples(old)


def rehearsal_generations(records: Iterable[Record]) -> frozenset[int]:
    """The generations that only rehearsed."""
    worlds = (record for record in records if isinstance(record, WorldFormed))
    return frozenset(world.generation for world in worlds if world.mode == "rehearsal")


def real_commits(records: Sequence[Record]) -> list[StepCommitted]:
    """The commits that count, in order; the very same record twice (a message sent again) is one."""
    rehearsals = rehearsal_generations(records)
    commits = (record for record in records if isinstance(record, StepCommitted))
    return list(dict.fromkeys(commit for commit in commits if commit.generation not in rehearsals))


def gather_executions(commits: Iterable[StepCommitted]) -> dict[Key, Execution]:
    """The executions by (generation, step), in the order of their first commits."""
    together: dict[Key, list[StepCommitted]] = {}
    for commit in commits:
        together.setdefault((commit.generation, commit.step), []).append(commit)
    return {
        (generation, step): Execution(generation=generation, step=step, commits=tuple(group))
        for (generation, step), group in together.items()
    }


def trace_lineage(records: Sequence[Record]) -> Lineage:
    """Follow a history from its first world to its end."""
    commits = real_commits(records)
    counted = set(commits)
    lineage = Lineage(executions=gather_executions(commits))
    steps = [commit.step for commit in commits]
    lineage.first_step = min(steps, default=None)
    generation: int | None = None
    by_host: set[tuple[int, int, int, int]] = set()
    for record in records:
        if isinstance(record, WorldFormed) and record.mode != "rehearsal":
            if generation is None:
                _begin(lineage, record)
            else:
                _roll_back(lineage, record.restored_step)
            generation = record.generation
        elif isinstance(record, StepCommitted) and record in counted:
            counted.discard(record)
            key = (record.slice_index, record.host_index, record.generation, record.step)
            _commit(lineage, record, generation, again=key in by_host)
            by_host.add(key)
    _end(lineage, records, generation)
    lineage.effective = dict(sorted(lineage.effective.items()))
    return lineage


def _begin(lineage: Lineage, world: WorldFormed) -> None:
    # An earlier run's snapshot: what came before it is not of this history.
    if world.restored_step is not None:
        lineage.started_fresh = False
        lineage.first_step = world.restored_step + 1


def _commit(lineage: Lineage, record: StepCommitted, generation: int | None, *, again: bool) -> None:
    key = (record.generation, record.step)
    execution = lineage.executions[key]
    if record.generation != generation:
        lineage.stale.append(record)
        known = lineage.effective.get(record.step) is execution or execution in lineage.rolled_back
        if not known:
            lineage.rolled_back.append(execution)
        return
    before = lineage.effective.get(record.step)
    if before is execution:
        if again:
            lineage.doubled[key] = execution
        return
    if before is not None:
        lineage.doubled[before.generation, before.step] = before
    elif record.step in lineage.unseen:
        lineage.doubled[key] = execution
    lineage.effective[record.step] = execution


def _end(lineage: Lineage, records: Sequence[Record], generation: int | None) -> None:
    """Commits may reach the history after its RunEnded, so that counts when all else is done."""
    ended = next((record for record in reversed(records) if isinstance(record, RunEnded)), None)
    if ended is None:
        return
    left = _step_left(ended)
    if ended.outcome == "completed":
        lineage.end_known = True
    elif left is not None:
        lineage.end_known = True
        _roll_back(lineage, left if left >= 0 else None, at_end=True)
    else:
        formed = [
            i for i, r in enumerate(records) if isinstance(r, WorldFormed) and r.generation == generation
        ]
        since = records[formed[-1] :] if formed else records
        lost = any(isinstance(record, LossDetected) for record in since)
        trained = any(key[0] == generation for key in lineage.executions)
        lineage.end_known = trained and not lost  # all of a world that had its state were there to the end


def _step_left(ended: RunEnded) -> int | None:
    """The newest step that a snapshot still held when the run failed; -1: none did; None: nobody looked."""
    if ended.restorable_step is None and ended.state_digest:
        return ended.final_step
    return ended.restorable_step


def _roll_back(lineage: Lineage, restored_step: int | None, *, at_end: bool = False) -> None:
    def is_kept(step: int) -> bool:
        return restored_step is not None and step <= restored_step

    newest = max(lineage.effective.keys() | lineage.unseen, default=None)
    undone = [*lineage.effective.values(), *lineage.doubled.values()]
    lineage.rolled_back.extend(old for old in undone if not is_kept(old.step))
    lineage.effective = {step: old for step, old in lineage.effective.items() if is_kept(step)}
    lineage.doubled = {key: old for key, old in lineage.doubled.items() if is_kept(old.step)}
    lineage.unseen = {step for step in lineage.unseen if is_kept(step)}
    if restored_step is None or at_end:
        return
    if newest is None:
        first = restored_step if lineage.first_step is None else lineage.first_step
        newest = min(first, restored_step) - 1
    for step in range(newest + 1, restored_step + 1):  # the snapshot knows more than the lineage so far
        _take_up(lineage, step)


def _take_up(lineage: Lineage, step: int) -> None:
    """A restored state includes `step` although it was rolled back or its commit was never heard of."""
    for index in range(len(lineage.rolled_back) - 1, -1, -1):
        if lineage.rolled_back[index].step == step:
            lineage.effective[step] = lineage.rolled_back.pop(index)
            return
    lineage.unseen.add(step)
