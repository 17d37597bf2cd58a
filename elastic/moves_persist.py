"""The persistent tier: shares of a snapshot put together, failures said, and what to read back from it.

The agents begin by themselves, all at the same captured steps; here their shares are counted, and the one
host that puts them together is told to. Nothing of it ever holds training up.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.events import FinishPersist, Persisted, PersistedFound, SharePersisted, StagePersisted, host_of
from elastic.records import PersistFailed, SnapshotPersisted
from elastic.state import Persisting
from elastic.turn import Turn

MAX_PERSISTED = 64
"""So many snapshots of the persistent tier are remembered as sources."""


def observe_found(turn: Turn, event: PersistedFound) -> None:
    """Earlier runs left snapshots: they precede every world of this job."""
    found = tuple(replace(snapshot, generation=0) for snapshot in event.snapshots)
    turn.change(persisted=found[:MAX_PERSISTED])


def observe_share(turn: Turn, event: SharePersisted) -> None:
    """Count the share; the last one of a step has the snapshot finished."""
    under_way = turn.state.persisting
    if under_way is None or event.step > under_way.step:
        if under_way is not None:
            abandon(turn, "the next one was due before all hosts had written it")
        missing = frozenset(turn.state.world)
        under_way = Persisting(step=event.step, began_unix_s=turn.now.unix_s, missing=missing)
    elif event.step < under_way.step:
        return
    under_way = replace(under_way, missing=under_way.missing - {event.slice_index})
    if event.error and not under_way.failed:
        write_failure(turn, event.step, event.slice_index, event.error)
        under_way = replace(under_way, failed=True)
    turn.change(persisting=under_way)
    if not under_way.missing and not under_way.failed:
        turn.send(
            FinishPersist(
                slice_index=turn.state.world[0],
                generation=turn.state.generation,
                step=under_way.step,
                restored_steps=turn.state.restored_steps,
            )
        )


def observe_persisted(turn: Turn, event: Persisted) -> None:
    """The snapshot is there for good (or not): it is a source from now on."""
    under_way = turn.state.persisting
    took_s = 0.0
    if under_way is not None and under_way.step == event.step:
        took_s = turn.now.unix_s - under_way.began_unix_s
        turn.change(persisting=None, uncovered="")
    if event.snapshot is None:
        write_failure(turn, event.step, event.slice_index, event.error)
        return
    others = tuple(snapshot for snapshot in turn.state.persisted if snapshot.step != event.step)
    turn.change(persisted=(event.snapshot, *others)[:MAX_PERSISTED])
    turn.write(
        SnapshotPersisted(
            unix_s=turn.now.unix_s,
            generation=event.snapshot.generation,
            step=event.step,
            persisted_bytes=event.persisted_bytes,
            took_s=took_s,
        )
    )


def abandon(turn: Turn, why: str) -> None:
    """The snapshot under way will not be complete: say so. One whose shares are all there still may be."""
    under_way = turn.state.persisting
    if under_way is None or turn.state.is_finishing_persist:
        return
    turn.change(persisting=None)
    if not under_way.failed:
        write_failure(turn, under_way.step, None, why)


def refuse(turn: Turn, step: int, why: str) -> None:
    """A snapshot of the persistent tier cannot be read: do not choose it again."""
    write_failure(turn, step, None, f"it cannot be read back: {why}")
    left = tuple(snapshot for snapshot in turn.state.persisted if snapshot.step != step)
    turn.change(persisted=left)


def write_failure(turn: Turn, step: int, slice_index: int | None, reason: str) -> None:
    """Add to the history that a snapshot is not in the persistent tier."""
    turn.change(persist_failed_step=max(turn.state.persist_failed_step, step))
    turn.write(
        PersistFailed(
            unix_s=turn.now.unix_s,
            generation=turn.state.generation,
            step=step,
            slice_index=slice_index,
            reason=reason,
        )
    )


def stage_persisted(turn: Turn) -> None:
    """Have every host of the forming world read its boxes of the chosen snapshot."""
    state = turn.state
    choice = state.choice
    assert choice is not None
    hosts = tuple(host_of(index) for index in state.world)
    target = choice.layout.resized(hosts, state.config.devices_per_host)
    boxes = {array.path: target.boxes_by_host(array) for array in target.arrays}
    for index, host in zip(state.world, hosts, strict=True):
        turn.send(
            StagePersisted(
                slice_index=index,
                generation=state.generation,
                step=choice.step,
                layout=choice.layout,
                boxes=tuple((path, box) for path, held in boxes.items() for box in held.get(host, ())),
                position=choice.position,
            )
        )
