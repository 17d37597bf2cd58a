"""Who sends how much: shares that even out what the sources send in all.

Each *pool* is a number of bytes that any of some hosts could send. Filling the hosts of a pool like vessels
with water gives the evenest loads for that pool alone; doing so for each in turn, again and again, tends to
the evenest for all, as the sum of squared loads falls with each (block coordinate descent on a convex
function).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reshard.grid import Column
from reshard.runs import Runs

Bytes = NDArray[np.float64]

MAX_SWEEPS = 6
GOOD_ENOUGH = 1.02
"""Largest load over a lower bound of it at which no further sweep is made."""


def even_shares(pools: Runs, pool_bytes: Column, num_hosts: int) -> Bytes:
    """Return the bytes that each host of each pool sends, `[n]` like `pools.values`.

    `pools` has the hosts of each pool, at least one, shape `[n, 1]`; `pool_bytes` is `[num_pools]`. Pools with
    the fewest hosts are filled first, then the largest, so that what has a choice fills up the gaps.
    """
    hosts, lengths = pools.values[:, 0], pools.lengths
    shares = np.zeros(len(hosts))
    is_fixed = lengths == 1
    shares[pools.begin[:-1][is_fixed]] = pool_bytes[is_fixed]
    load = np.bincount(hosts, weights=shares, minlength=num_hosts)
    bound = max(pool_bytes.sum() / max(len(np.unique(hosts)), 1), load.max(initial=0))
    order = np.lexsort((-pool_bytes, lengths))
    open_pools = order[~is_fixed[order]].tolist()
    before = np.inf
    for _ in range(MAX_SWEEPS):
        for pool in open_pools:
            run = slice(pools.begin[pool], pools.begin[pool + 1])
            others = load[hosts[run]] - shares[run]
            shares[run] = _fill(others, float(pool_bytes[pool]))
            load[hosts[run]] = others + shares[run]
        if load.max(initial=0) <= GOOD_ENOUGH * bound or load.max(initial=0) >= before:
            break
        before = load.max(initial=0)
    return shares


def _fill(load: Bytes, nbytes: float) -> Bytes:
    """Return the shares of `nbytes` that raise the lowest of `load` to one level."""
    ascending = np.sort(load)
    levels = (nbytes + np.cumsum(ascending)) / np.arange(1, len(load) + 1)
    level = levels[np.flatnonzero(ascending <= levels)[-1]]
    filled: Bytes = np.maximum(level - load, 0)
    return filled
