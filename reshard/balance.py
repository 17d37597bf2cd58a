"""Who sends how much: shares that even out what the sources send in all.

Each *pool* is a number of bytes that any of some hosts could send. Filling the hosts of a pool like vessels
with water gives the evenest loads for that pool alone; doing so for each in turn, again and again, tends to
the evenest for all, as the sum of squared loads falls with each (block coordinate descent on a convex
function).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reshard.grid import Column

Bytes = NDArray[np.float64]

MAX_SWEEPS = 6
GOOD_ENOUGH = 1.02
"""Largest load over a lower bound of it at which no further sweep is made."""


def even_shares(pool_bytes: Sequence[int], pools: Sequence[Column], num_hosts: int) -> list[Bytes]:
    """Return, for each pool, the bytes that each of its hosts sends: `[len(pool)]`, their sum the pool's.

    `pools` are the hosts of each, at least one. Pools with the fewest hosts are filled first, then the
    largest, so that what has a choice fills up the gaps. Deterministic.
    """
    shares = [np.zeros(len(hosts)) for hosts in pools]
    load = np.zeros(num_hosts)
    order = sorted(range(len(pools)), key=lambda p: (len(pools[p]), -pool_bytes[p], pools[p].tolist()))
    open_pools = [pool for pool in order if len(pools[pool]) > 1]
    for pool in order:
        if len(pools[pool]) == 1:
            shares[pool][0] = pool_bytes[pool]
            load[pools[pool][0]] += pool_bytes[pool]
    bound = _least_maximum(pool_bytes, pools, load)
    for _ in range(MAX_SWEEPS):
        before = load.max(initial=0)
        for pool in open_pools:
            hosts = pools[pool]
            others = load[hosts] - shares[pool]
            shares[pool] = _fill(others, pool_bytes[pool])
            load[hosts] = others + shares[pool]
        if load.max(initial=0) <= max(GOOD_ENOUGH * bound, 0) or load.max(initial=0) == before:
            break
    return shares


def _least_maximum(pool_bytes: Sequence[int], pools: Sequence[Column], fixed_load: Bytes) -> float:
    """Return a lower bound of the largest load: the mean over all sources, and what has no choice."""
    sources = np.unique(np.concatenate([np.zeros(0, np.int64), *pools]))
    return max(sum(pool_bytes) / max(len(sources), 1), float(fixed_load.max(initial=0)))


def _fill(load: Bytes, nbytes: float) -> Bytes:
    """Return the shares of `nbytes` that raise the lowest of `load` to one level."""
    ascending = np.sort(load)
    levels = (nbytes + np.cumsum(ascending)) / np.arange(1, len(load) + 1)
    level = levels[np.flatnonzero(ascending <= levels)[-1]]
    filled: Bytes = np.maximum(level - load, 0)
    return filled
