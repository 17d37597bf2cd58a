"""Which slots a view shows: those of the newest snapshot that they cover together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from reshard.errors import CorruptCopyError, ElasticError, MissingShardError, RetryLaterError, UsageError
from snapshot.contents import RejectedCopy
from snapshot.locate import START_ONE, FoundJob, slot_files
from snapshot.mapped_slot import MappedSlot, open_slot
from snapshot.survey import gaps, reason_of

Order = tuple[int, int]

_CHOICE_ATTEMPTS = 50


def choose_slots(
    job: FoundJob, step: int | None, *, partial: bool
) -> tuple[tuple[MappedSlot, ...], tuple[RejectedCopy, ...]]:
    """Map the slots of the newest covered snapshot (of `step`, if given), and say which were refused.

    Slots are of one snapshot only when step and generation are the same. The hosts are looked at one after
    the other, so a job that captures meanwhile may show each of them another step: then all again. Raises
    what `snapshot.open` raises.
    """
    failure: ElasticError | None = None
    for _ in range(_CHOICE_ATTEMPTS):
        slots, rejected, is_settled = _open_all(job)
        chosen: tuple[MappedSlot, ...] = ()
        try:
            by_order = group_by_order(slots)
            _require_some(job, by_order, rejected)
            chosen = _newest(by_order, step, partial=partial)
            return chosen, tuple(rejected)
        except ElasticError as error:
            failure = error
            is_settled = is_settled and all(slot.is_current() for slot in slots)
        finally:
            for slot in slots:
                if slot not in chosen:
                    slot.close()
        if is_settled:
            break
    assert failure is not None
    raise failure


def group_by_order(slots: Sequence[MappedSlot]) -> dict[Order, list[MappedSlot]]:
    """Return the slots of each snapshot, the newest snapshot first."""
    by_order: defaultdict[Order, list[MappedSlot]] = defaultdict(list)
    for slot in slots:
        by_order[slot.manifest.order].append(slot)
    return dict(sorted(by_order.items(), reverse=True))


def _open_all(job: FoundJob) -> tuple[list[MappedSlot], list[RejectedCopy], bool]:
    """Map every complete slot; also tell whether a second look would be idle: none was empty or went away."""
    slots: list[MappedSlot] = []
    rejected: list[RejectedCopy] = []
    is_settled = True
    try:
        for host, path in slot_files(job):
            try:
                slot = open_slot(host, path)
            except FileNotFoundError:
                is_settled = False
            except (CorruptCopyError, OSError) as error:
                rejected.append(RejectedCopy(name=f"{host}/{path.name}", reason=reason_of(error)))
            else:
                slots += [] if slot is None else [slot]
                is_settled = is_settled and slot is not None
    except BaseException:
        for opened in slots:
            opened.close()
        raise
    return slots, rejected, is_settled


def _require_some(
    job: FoundJob, by_order: dict[Order, list[MappedSlot]], rejected: list[RejectedCopy]
) -> None:
    if not by_order and not job.directory.is_dir():
        raise UsageError(f"job {job.job_id} has ended: {job.directory} is gone", remedy=START_ONE)
    if not by_order:
        damaged = "".join(f"; {copy.name}: {copy.reason}" for copy in rejected)
        raise RetryLaterError(
            f"job {job.job_id} has no complete snapshot in {job.directory}{damaged}",
            remedy="Wait for its first capture." if not rejected else "Wait for its next capture.",
        )


def _newest(
    by_order: dict[Order, list[MappedSlot]], step: int | None, *, partial: bool
) -> tuple[MappedSlot, ...]:
    wanted = {order: slots for order, slots in by_order.items() if step in (None, order[1])}
    if not wanted:
        held = ", ".join(str(held) for held in sorted({order[1] for order in by_order}))
        raise UsageError(f"step {step} is not held, only {held}", remedy="Choose one of these.", step=step)
    error: MissingShardError | None = None
    for slots in wanted.values():
        uncovered = {} if partial else gaps([slot.manifest for slot in slots])
        if not uncovered:
            return tuple(slots)
        path, boxes = next(iter(uncovered.items()))
        if error is None:
            error = MissingShardError(path, boxes[0], slots[0].manifest.step)
            error.remedy = "Look on the machines of the other hosts, or open it with partial=True."
    assert error is not None
    raise error
