"""Comparing the copies of each capture across slices: what the state machine keeps for it, as frozen values.

At each capture the workers tell the checksums of what they stored; at an audit, those of all that is on
their devices. Copies of one (step, generation) are compared once every slice of the world has told, or with
those that have when newer steps push it out: nobody is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic.events import Captured
from elastic.members import host_of
from elastic.records import CorruptionSuspected, SuspectBox
from reshard.copies import CopyIndex, Disagreement
from reshard.layout import Layout

MAX_STEPS = 4
"""Captures whose checksums are kept while some slices have not told theirs yet; and newer ones for which a
slice is waited for."""
MAX_GENERATIONS = 16
"""For so many generations it is remembered whose copies were wrong: longer than any snapshot lives."""
MAX_NAMED = 8
"""Arrays that one record names; how many there are it counts."""
TELL_EVERY = 50
"""Comparisons of captures until the history is told of them."""

Named = frozenset[tuple[int, str, int]]
"""(generation, path, slice): arrays of which a majority has found a slice's copy wrong in a generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The checksums that members have told of one capture, or of one audit."""

    step: int
    is_audit: bool
    checksums: tuple[tuple[int, bytes], ...]
    num_newer: int = 0
    """Newer ones that have been compared since."""

    @property
    def members(self) -> tuple[int, ...]:
        """The members that have told."""
        return tuple(member for member, _ in self.checksums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One table, compared."""

    step: int
    is_audit: bool
    slices: tuple[int, ...]
    num_boxes: int
    """Boxes of which there was more than one copy to compare."""
    disagreements: tuple[Disagreement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convicted:
    """A slice whose copy of an array, after a step, a majority of the present world has found wrong."""

    slice_index: int
    path: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCheck:
    """What is known of the copies of the present world's captures."""

    generation: int = 0
    hosts_per_slice: int = 1
    layout: Layout | None = None
    stored_index: CopyIndex | None = field(default=None, compare=False, repr=False)
    device_index: CopyIndex | None = field(default=None, compare=False, repr=False)
    tables: tuple[Table, ...] = ()
    newest_done: tuple[int, int] = (-1, -1)
    """The newest capture and audit that were compared: what comes of older ones is too late."""
    wants_audit: bool = False
    audit_step: int | None = None
    """The step from which on an audit was ordered that has not been compared yet."""
    is_audited: bool = False
    """Whether the newest audit of this generation has found something: no need to order another."""
    audited_paths: frozenset[str] = frozenset()
    """The arrays that audits of this generation have found: captures need not tell of them again."""
    num_untold: int = 0
    """Comparisons of captures that the history has not been told of yet."""
    num_told: int = 0
    named: Named = frozenset()
    convicted: tuple[Convicted, ...] = ()
    """Whom majorities have named in this world, one entry a slice."""
    differed_since: tuple[int, int] | None = None
    """(generation, step): the first step of the newest world in which copies differed. Older ones agreed, as
    far as they were compared."""

    def entered(self, generation: int, layout: Layout | None) -> CopyCheck:
        """For a new world, or for its layout; which copies majorities have found wrong before is kept."""
        if generation == self.generation:
            return replace(self, layout=self.layout or layout)
        kept = frozenset(named for named in self.named if named[0] > generation - MAX_GENERATIONS)
        return CopyCheck(
            generation=generation,
            hosts_per_slice=self.hosts_per_slice,
            layout=layout,
            named=kept,
            differed_since=self.differed_since,
        )

    def found(self, comparison: Comparison) -> CopyCheck:
        """After a comparison in which copies differed: since when, and on which slices."""
        since = self.differed_since
        is_first = since is None or since[0] != self.generation
        if is_first or (since is not None and comparison.step < since[1]):
            since = (self.generation, comparison.step)
        convicted = {one.slice_index: one for one in reversed(self.convicted)}
        for _, path, slice_index in sorted(named_by(comparison, self.generation)):
            new = Convicted(slice_index=slice_index, path=path, step=comparison.step)
            convicted.setdefault(slice_index, new)
        named = self.named | named_by(comparison, self.generation)
        return replace(self, named=named, convicted=tuple(convicted.values()), differed_since=since)

    def taken_in(
        self, event: Captured, world: tuple[int, ...], replicas: int
    ) -> tuple[CopyCheck, list[Comparison]]:
        """Take in what one host told; return what could be compared with it. `world` are its members.

        What comes before the layout, on another host's way, waits for it. A table that does not fit the
        layout is left out (its host is then not compared).
        """
        check = self.entered(event.generation, None)
        if event.step <= check.newest_done[event.is_audit]:
            return check, []
        check = check._with_table(event)
        if check.layout is None:
            return replace(check, tables=check.tables[-MAX_STEPS:]), []
        done: list[Comparison] = []
        waiting: list[Table] = []
        num_spare = len(check.tables) - MAX_STEPS
        for place, table in enumerate(check.tables):
            is_given_up = place < num_spare or table.num_newer >= MAX_STEPS
            if set(world) <= set(table.members) or (is_given_up and len(table.checksums) > 1):
                check, index = check._with_index(check.layout, replicas, is_audit=table.is_audit)
                done.append(_compare(table, index, self.hosts_per_slice))
            elif not is_given_up:
                waiting.append(table)
        return check._with_done(waiting, done), done

    def _with_done(self, waiting: list[Table], done: list[Comparison]) -> CopyCheck:
        newest = list(self.newest_done)
        for comparison in done:
            newest[comparison.is_audit] = max(newest[comparison.is_audit], comparison.step)
            waiting = [
                replace(table, num_newer=table.num_newer + (comparison.step > table.step))
                for table in waiting
            ]
        return replace(self, tables=tuple(waiting), newest_done=(newest[0], newest[1]))

    def _with_table(self, event: Captured) -> CopyCheck:
        key = (event.step, event.is_audit)
        tables = {(table.step, table.is_audit): table for table in self.tables}
        known = tables.get(key, Table(step=event.step, is_audit=event.is_audit, checksums=()))
        others = tuple(entry for entry in known.checksums if entry[0] != event.member)
        tables[key] = replace(known, checksums=(*others, (event.member, event.checksums)))
        return replace(self, tables=tuple(tables[key] for key in sorted(tables)))

    def _with_index(self, layout: Layout, replicas: int, *, is_audit: bool) -> tuple[CopyCheck, CopyIndex]:
        """The index of what is compared, worked out once for a world, when it is first needed."""
        if is_audit:
            index = self.device_index or CopyIndex.of_devices(layout)
            return replace(self, device_index=index), index
        index = self.stored_index or CopyIndex.of_captures(layout, replicas)
        return replace(self, stored_index=index), index


def _compare(table: Table, index: CopyIndex, hosts_per_slice: int) -> Comparison:
    told = {host_of(member, hosts_per_slice): checksums for member, checksums in sorted(table.checksums)}
    fitting = {host: checksums for host, checksums in told.items() if index.fits(host, checksums)}
    return Comparison(
        step=table.step,
        is_audit=table.is_audit,
        slices=tuple(dict.fromkeys(host.slice_index for host in fitting)),
        num_boxes=index.num_compared(fitting),
        disagreements=index.compare(fitting),
    )


def named_by(comparison: Comparison, generation: int) -> Named:
    """The copies that a majority found wrong."""
    return frozenset(
        (generation, found.path, slice_index)
        for found in comparison.disagreements
        if found.good is not None
        for slice_index in found.suspects
    )


def is_known(comparison: Comparison, check: CopyCheck) -> bool:
    """Whether all that differs has been found by an audit already, so that a capture tells nothing new."""
    return check.is_audited and check.audited_paths >= {found.path for found in comparison.disagreements}


def disagreement_record(comparison: Comparison, generation: int, unix_s: float) -> CorruptionSuspected:
    """What the history says of a comparison with a finding: at most `MAX_NAMED` arrays, one box of each.

    The suspects are the slices that majorities name; without any, all whose copies differ.
    """
    by_path: dict[str, Disagreement] = {}
    for found in comparison.disagreements:
        known = by_path.setdefault(found.path, found)
        if known.good is None and found.good is not None:
            by_path[found.path] = found
    paths = sorted(by_path, key=lambda path: (by_path[path].good is None, path))
    is_named = any(found.good is not None for found in comparison.disagreements)
    suspects = {
        slice_index
        for found in comparison.disagreements
        if (found.good is not None) == is_named
        for slice_index in found.suspects
    }
    return CorruptionSuspected(
        unix_s=unix_s,
        generation=generation,
        step=comparison.step,
        is_audit=comparison.is_audit,
        num_arrays=len(by_path),
        num_boxes=len(comparison.disagreements),
        slices=comparison.slices,
        suspects=tuple(sorted(suspects)),
        is_majority=is_named,
        boxes=tuple(_suspect_box(by_path[path]) for path in paths[:MAX_NAMED]),
    )


def _suspect_box(found: Disagreement) -> SuspectBox:
    return SuspectBox(
        path=found.path,
        box=found.box,
        slices=found.slices,
        suspects=found.suspects,
        is_majority=found.good is not None,
        devices=tuple(copy.position for copy in found.suspect_copies if copy.position >= 0),
    )
