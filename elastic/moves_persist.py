"""The persistent tier: shares of a snapshot put together, failures said, and what to read back from it.

The agents begin by themselves, all at the same captured steps; here their shares are counted, and the one
host that puts them together is told to. Nothing of it ever holds training up.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.events import (
    FinishPersist,
    Persisted,
    PersistedFound,
    PersistSettled,
    SharePersisted,
    StagePersisted,
)
from elastic.records import PersistFailed, SnapshotPersisted
from elastic.state import Persisting
from elastic.turn import Turn
from reshard.layout import Layout

MAX_PERSISTED = 64
"""So many snapshots of the persistent tier are remembered as sources."""


def observe_found(turn: Turn, event: PersistedFound) -> None:
    """Earlier runs left snapshots: they precede every world of this job."""
    found = tuple(replace(snapshot, generation=0) for snapshot in event.snapshots)
    turn.change(persisted=found[:MAX_PERSISTED])


def observe_share(turn: Turn, event: SharePersisted) -> None:
    """Count the share; the last one of a step has the snapshot finished."""
    if event.left_out:
        _note_left_out(turn, event)
        return
    under_way = _under_way(turn, event)
    if under_way is None:
        if event.step <= turn.state.persist_settled_step:
            return
        missing = frozenset(turn.state.world)
        generation, began_s = event.generation, turn.now.mono_s
        under_way = Persisting(generation=generation, step=event.step, began_s=began_s, missing=missing)
    if event.error:
        write_failure(turn, event.step, event.member, event.error)
        _settle(turn, event.generation, event.step, failed=True)
        return
    if event.member not in under_way.missing:
        return  # told again
    finisher = turn.state.world[0]
    others = tuple(one for one in turn.state.persisting if one is not under_way)
    missing = under_way.missing - {event.member}
    under_way = replace(under_way, missing=missing, finisher=finisher)
    turn.change(persisting=(*others, under_way))
    if not missing:
        turn.send(
            FinishPersist(
                member=finisher,
                generation=turn.state.generation,
                step=under_way.step,
                restored_steps=turn.state.restored_steps,
            )
        )


def observe_persisted(turn: Turn, event: Persisted) -> None:
    """The snapshot is there for good (or not): it is a source from now on."""
    under_way = _under_way(turn, event)
    if under_way is None and _is_known(turn, event):
        return  # told again
    turn.change(uncovered="")
    if event.snapshot is None:
        write_failure(turn, event.step, event.member, event.error)
    else:
        others = tuple(snapshot for snapshot in turn.state.persisted if snapshot.step != event.step)
        turn.change(persisted=(event.snapshot, *others)[:MAX_PERSISTED])
        turn.write(
            SnapshotPersisted(
                unix_s=turn.now.unix_s,
                generation=event.snapshot.generation,
                step=event.step,
                persisted_bytes=event.persisted_bytes,
                took_s=None if under_way is None else turn.now.mono_s - under_way.began_s,
            )
        )
    _settle(turn, event.generation, event.step, failed=event.snapshot is None)


def _is_known(turn: Turn, event: Persisted) -> bool:
    if event.snapshot is None:
        return event.step <= turn.state.persist_failed_step
    found = (event.snapshot.generation, event.step)
    return found in {(one.generation, one.step) for one in turn.state.persisted}


def _under_way(turn: Turn, event: SharePersisted | Persisted) -> Persisting | None:
    found = (event.generation, event.step)
    return next((one for one in turn.state.persisting if (one.generation, one.step) == found), None)


def leave_world(turn: Turn, why: str) -> None:
    """The next generation begins: its world may come to the same steps again, and persist them anew."""
    abandon(turn, why)
    turn.change(persist_settled_step=-1, persist_left_out_step=-1, persist_failed_step=-1)


def abandon(turn: Turn, why: str) -> None:
    """What is not written yet will not be complete: say so. What is being put together still may be."""
    for under_way in turn.state.persisting:
        if under_way.missing:
            _give_up(turn, under_way, why)


def lose_shares(turn: Turn, member: int) -> None:
    """An agent was started again: what it was writing is gone."""
    for under_way in turn.state.persisting:
        is_finisher = not under_way.missing and member == under_way.finisher
        if member in under_way.missing or is_finisher:
            who = turn.state.config.name(member)
            _give_up(turn, under_way, f"the agent of {who} was started again while it wrote")


def repeat_settled(turn: Turn, member: int) -> None:
    """An agent has attached: it may not have heard that a step is settled."""
    state = turn.state
    if state.persist_settled_step >= 0:
        turn.send(
            PersistSettled(
                member=member,
                generation=state.generation,
                step=state.persist_settled_step,
                failed=False,
            )
        )


def give_up_late(turn: Turn) -> None:
    """Nothing is waited for without a bound."""
    for under_way in turn.state.persisting:
        if turn.is_past(under_way.began_s + turn.state.config.timing.persist_s):
            _give_up(turn, under_way, "not all hosts have written it in time")


def _give_up(turn: Turn, under_way: Persisting, why: str) -> None:
    write_failure(turn, under_way.step, None, why)
    _settle(turn, under_way.generation, under_way.step, failed=True)


def _settle(turn: Turn, generation: int, step: int, *, failed: bool) -> None:
    """Nothing more is expected of a step: let all hosts know, so that they begin the next one together."""
    left = tuple(one for one in turn.state.persisting if (one.generation, one.step) != (generation, step))
    turn.change(persisting=left)
    if generation == turn.state.generation:
        turn.change(persist_settled_step=max(turn.state.persist_settled_step, step))
    for index in turn.state.world:
        turn.send(PersistSettled(member=index, generation=generation, step=step, failed=failed))


def _note_left_out(turn: Turn, event: SharePersisted) -> None:
    """Write it down once: all hosts leave out the same."""
    if event.step > turn.state.persist_left_out_step:
        turn.change(persist_left_out_step=event.step)
        _write(turn, event.step, None, event.error)


def refuse(turn: Turn, step: int, why: str) -> None:
    """A snapshot of the persistent tier cannot be read: do not choose it again."""
    write_failure(turn, step, None, f"it cannot be read back: {why}")
    left = tuple(snapshot for snapshot in turn.state.persisted if snapshot.step != step)
    turn.change(persisted=left)


def write_failure(turn: Turn, step: int, index: int | None, reason: str) -> None:
    """A snapshot that was begun is not in the persistent tier."""
    turn.change(persist_failed_step=max(turn.state.persist_failed_step, step))
    _write(turn, step, index, reason)


def _write(turn: Turn, step: int, index: int | None, reason: str) -> None:
    turn.write(
        PersistFailed(
            unix_s=turn.now.unix_s,
            generation=turn.state.generation,
            step=step,
            **({"slice_index": None} if index is None else turn.place(index)),
            reason=reason,
        )
    )


def stage_persisted(turn: Turn, target: Layout) -> None:
    """Have every host of the forming world read its boxes of the chosen snapshot, laid out as `target`."""
    state = turn.state
    choice = state.choice
    assert choice is not None
    boxes = {array.path: target.boxes_by_host(array) for array in target.arrays}
    for index in state.world:
        turn.send(
            StagePersisted(
                member=index,
                generation=state.generation,
                step=choice.step,
                layout=choice.layout,
                boxes=tuple(
                    (path, box)
                    for path, held in boxes.items()
                    for box in held.get(state.config.host(index), ())
                ),
                position=choice.position,
            )
        )
