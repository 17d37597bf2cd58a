"""Which samples a run used, missed or used twice, from the journals in its commits.

A step's batch covers the places `position … position + len(sample_ids)` of the endless stream of epochs.

*Lost*: a place that no effective step covers although it lies between the start of the stream and the end of
the last effective step, or was covered by an execution that is no longer effective; and an id that a
rolled-back execution had at places where the effective one has other ids.

*Repeated*: a place covered by more than one effective step, and an id used more than once in one epoch. An
epoch is `place // epoch_samples`. If the history does not say how many samples an epoch has, the number of
distinct ids in it stands in: that is the same number once one epoch is complete, and before that at most
smaller by the ids that occur twice; so then a repetition among the very last samples can go unseen, and none
is reported that isn't there. It needs a stream that begins at place 0: for one that does not, ids without
`epoch_samples` cannot be judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.history_lineage import Execution, Lineage

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAudit:
    """The counts, and what of it could not be known."""

    consumed: int
    lost: int
    repeated: int
    lost_known: bool
    repeated_known: bool


def audit_samples(lineage: Lineage, epoch_samples: int | None = None) -> SampleAudit:
    """Account for every sample of a lineage."""
    effective = lineage.applied
    consumed = sum(len(execution.sample_ids) for execution in effective)
    anything = any(execution.sample_ids for execution in lineage.executions.values())
    is_blind = any(not execution.sample_ids for execution in effective)
    overlapping, covered = _cover(effective)
    base = 0 if lineage.started_fresh else min((execution.position for execution in effective), default=0)
    if not lineage.started_fresh and epoch_samples is None:
        twice = None
    else:
        twice = count_repeated_ids(effective, epoch_samples or _distinct_ids(lineage))
    return SampleAudit(
        consumed=consumed,
        lost=_lost_places(lineage, covered, base, is_blind=is_blind) + _replaced_ids(lineage, effective),
        repeated=overlapping + (twice or 0),
        lost_known=anything and lineage.end_known and not lineage.unseen and not is_blind,
        repeated_known=anything and not lineage.unseen and not is_blind and twice is not None,
    )


def count_repeated_ids(executions: Iterable[Execution], epoch_samples: int) -> int:
    """How often an id is used again within an epoch of `epoch_samples`, at another place of the stream."""
    place_of: dict[tuple[int, int], int] = {}
    repeated = 0
    for execution in executions:
        for place, sample_id in enumerate(execution.sample_ids, execution.position):
            first = place_of.setdefault((place // epoch_samples, sample_id), place)
            repeated += first != place  # the same place twice is an overlap, and counted as that
    return repeated


def disagreeing_journals(executions: Iterable[Execution]) -> list[Execution]:
    """Executions whose slices wrote down different samples or places."""
    return [
        execution
        for execution in executions
        if len({(commit.position, commit.sample_ids) for commit in execution.commits if commit.sample_ids})
        > 1
    ]


def _distinct_ids(lineage: Lineage) -> int:
    ids: set[int] = set()
    for execution in lineage.executions.values():
        ids.update(execution.sample_ids)
    return max(len(ids), 1)


def _cover(executions: Sequence[Execution]) -> tuple[int, list[Interval]]:
    """How many places are covered again, and the merged intervals that are covered at all."""
    overlapping = 0
    covered: list[Interval] = []
    for start, stop in sorted((e.position, e.end_position) for e in executions if e.sample_ids):
        if covered and start <= covered[-1][1]:
            overlapping += min(stop, covered[-1][1]) - start
            covered[-1] = (covered[-1][0], max(stop, covered[-1][1]))
        else:
            covered.append((start, stop))
    return overlapping, covered


def _size(intervals: Iterable[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _lost_places(lineage: Lineage, covered: list[Interval], base: int, *, is_blind: bool) -> int:
    """Places that ought to be covered and are not; those of unseen steps, or without a journal entry, are
    unknown, not lost.
    """
    expected = [execution for execution in lineage.rolled_back if execution.step not in lineage.unseen]
    intervals = [(execution.position, execution.end_position) for execution in expected]
    if covered and not lineage.unseen and not is_blind:
        intervals.append((min(base, covered[0][0]), covered[-1][1]))
    union = _merge(intervals + covered)
    return _size(union) - _size(covered)


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _replaced_ids(lineage: Lineage, effective: Sequence[Execution]) -> int:
    """Ids of rolled-back executions whose places are covered, but by other ids."""
    places = {
        place
        for execution in lineage.rolled_back
        for place in range(execution.position, execution.end_position)
    }
    if not places:
        return 0
    id_at: dict[int, int] = {
        place: sample_id
        for execution in effective
        for place, sample_id in enumerate(execution.sample_ids, execution.position)
        if place in places
    }
    replaced: dict[int, int] = {}
    for execution in lineage.rolled_back:
        old = {p: i for p, i in enumerate(execution.sample_ids, execution.position) if p in id_at}
        missing = Counter(old.values()) - Counter(id_at[place] for place in old)
        replaced[execution.step] = max(replaced.get(execution.step, 0), missing.total())
    return sum(replaced.values())
