"""Rehearsing alone: a process plays all ranks of a world, and so has traced what it may need. Pure.

A world after a loss, or after a join, has another size; a process that has never been in one of that size
traces the step for it, while all others wait. So a process that stands by, and one that is idle while others
rehearse, is given a world of its own (`WorldSpec.solo`): the runtime pretends the other processes, the script
goes through its first step, and programs that span processes are traced, not run (their results are zeros).
"""

from __future__ import annotations

from elastic.events import WorldSpec
from elastic.state import Config

MAX_PROCESSES = 64
"""A world of more is not rehearsed alone: each process of it costs a client for a moment."""


def solo_world(config: Config, size: int, generation: int) -> WorldSpec:
    """A world of `size` slices for one process alone."""
    return WorldSpec(
        generation=generation,
        rank=0,
        slices=tuple(range(size)),
        hosts_per_slice=config.hosts_per_slice,
        service_address="",
        restore_step=None,
        newest_committed=-1,
        rehearsal=True,
        solo=True,
        replicas=config.replicas,
        persists=config.persists,
        audit_every=config.audit_every,
    )


def sizes_ahead(config: Config, size: int) -> tuple[int, ...]:
    """The sizes of the worlds that a process may be in after one of `size` slices, the likeliest first.

    Of the whole job: as it is, and after a loss. Of a smaller one: when a slice is back, as it is, when all
    are back.
    """
    whole = config.num_slices
    wanted = (size, size - 1) if size >= whole else tuple(dict.fromkeys((size + 1, size, whole)))
    return tuple(
        each
        for each in wanted
        if max(config.min_slices, 1) <= each and each * config.hosts_per_slice <= MAX_PROCESSES
    )
