"""Steps that a worker captured and nobody was told of: it died before it could say so, or its agent did.

A captured step is committed: the capture begins once its outputs are good. What it used is in the journal.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.events import SnapshotSummary
from elastic.protocol import WorkerCommitted
from reshard.errors import ElasticError
from snapshot.arena import Arena

MAX_STEPS = 64
"""Of those before the captured one no more are looked up."""


def has_untold(held: Iterable[SnapshotSummary], told: tuple[int, int]) -> bool:
    """Whether it is worth a look: a snapshot in this host's memory is newer than the newest commit `told`."""
    return any((snapshot.generation, snapshot.step) > told for snapshot in held)


def untold_commits(arena: Arena, told: tuple[int, int]) -> tuple[WorkerCommitted, ...]:
    """The commits, in order, after those `told` (the generation and step of the newest), up to the newest
    snapshot of this host's worker, of its generation; as far as the journal has them. How long they took, and
    their loss, is not known.
    """
    captured = [(manifest.generation, manifest.step) for manifest in arena.captured().complete]
    newest = max(captured, default=(-1, -1))
    if newest <= told:
        return ()
    generation, last = newest
    first = told[1] + 1 if told[0] == generation else 0
    try:
        reader = arena.journal_reader()
    except (ElasticError, OSError):  # damaged, or there is none: what the steps used is not known
        return ()
    with_entry = {record.step for record in reader.records() if record.generation == generation}
    reader.close()
    steps = sorted(step for step in with_entry if first <= step <= last)
    return tuple(_found(step, generation) for step in steps[-MAX_STEPS:])


def _found(step: int, generation: int) -> WorkerCommitted:
    return WorkerCommitted(
        generation=generation,
        step=step,
        loss=None,
        step_s=0.0,
        stall_s=0.0,
        captured_bytes=0,
        compile_s=0.0,
        cache_hits=0,
        cache_misses=0,
    )
