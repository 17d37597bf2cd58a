"""Silent corruption: what each capture's checksums say, and ordering an audit when they disagree."""

from __future__ import annotations

from dataclasses import replace

from elastic.copy_check import TELL_EVERY, Comparison, disagreement_record, is_known
from elastic.events import AuditAfter, Captured, LaidOut
from elastic.records import CopiesCompared
from elastic.turn import Turn

STEPS_TO_AUDIT = 2
"""A running step and one more, so that the order arrives everywhere before the step it names."""


def note_layout(turn: Turn, event: LaidOut) -> None:
    """Take in what is where in the present world; told again (by another agent), it changes nothing."""
    told = dict(turn.state.layouts) | {len(turn.state.world_slices): event.layout}
    turn.change(layouts=tuple(sorted(told.items(), key=lambda item: item[0])))
    if not event.lacking and not turn.state.rehearsing:
        turn.change(copies=turn.state.copies.entered(event.generation, event.layout))


def note_checksums(turn: Turn, event: Captured) -> None:
    """Compare what can be compared with one host's checksums more, and write down what comes of it."""
    copies, done = turn.state.copies.taken_in(event, turn.state.world, turn.state.config.replicas)
    turn.change(copies=copies)
    for comparison in done:
        _conclude(turn, comparison)


def order_audit(turn: Turn) -> None:
    """Have all hosts audit at the same step soon, once after copies disagreed."""
    state = turn.state
    if not state.copies.wants_audit:
        return
    audit_step = max(state.newest_committed, *state.copies.newest_done) + STEPS_TO_AUDIT
    turn.change(copies=replace(state.copies, wants_audit=False, audit_step=audit_step))
    for index in state.world:
        turn.send(AuditAfter(member=index, generation=state.generation, step=audit_step))


def tell_comparisons(turn: Turn) -> None:
    """Write down how many comparisons there were since the last time."""
    copies = turn.state.copies
    if copies.num_untold:
        _tell(turn, copies.num_untold, is_audit=False)
        turn.change(copies=replace(copies, num_untold=0, num_told=copies.num_told + copies.num_untold))


def _conclude(turn: Turn, comparison: Comparison) -> None:
    if not comparison.num_boxes:
        return  # no box has a second copy: nothing was compared
    copies = turn.state.copies
    is_bad = bool(comparison.disagreements)
    if comparison.is_audit:
        _tell(turn, 1, is_audit=True)
        is_answer = copies.audit_step is not None and comparison.step >= copies.audit_step
        audit_step = None if is_answer else copies.audit_step
        copies = replace(copies, audit_step=audit_step, is_audited=is_bad, wants_audit=False)
    else:
        copies = replace(copies, num_untold=copies.num_untold + 1)
    if is_bad:
        if comparison.is_audit or not is_known(comparison, copies):
            turn.write(disagreement_record(comparison, copies.generation, turn.now.unix_s))
        copies = replace(
            copies.found(comparison),
            audited_paths=copies.audited_paths | _audited_paths(comparison),
            wants_audit=not copies.is_audited and copies.audit_step is None,
        )
    turn.change(copies=copies)
    # The first of a world at once, so that a history without an end shows that copies are compared.
    if copies.num_told == 0 or copies.num_untold >= TELL_EVERY:
        tell_comparisons(turn)


def _audited_paths(comparison: Comparison) -> frozenset[str]:
    return frozenset(found.path for found in comparison.disagreements if comparison.is_audit)


def _tell(turn: Turn, num_captures: int, *, is_audit: bool) -> None:
    turn.write(
        CopiesCompared(
            unix_s=turn.now.unix_s,
            generation=turn.state.copies.generation,
            is_audit=is_audit,
            num_captures=num_captures,
        )
    )
