"""Who sends how much: shares that even out what the sources send in all.

Each *pool* is a number of bytes that any of some hosts could send. The shares that make the sum of the
squared loads least also make the largest load least. They are found by projected gradient steps with
momentum, all pools at once, as loads along a chain of pools even out slowly pool by pool.
Source of the method: Beck and Teboulle 2009, https://doi.org/10.1137/080716542; of the restarts: O'Donoghue
and Candès 2015, https://doi.org/10.1007/s10208-013-9150-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from reshard.grid import Column
from reshard.runs import Runs

ByteShares = NDArray[np.float64]
"""Numbers of bytes, which need not be whole."""

MAX_STEPS = 400
PATIENCE = 20
"""Steps in which the largest load must fall by a thousandth, or the search ends."""
GOOD_ENOUGH = 1.01
"""Largest load, over the mean or what has no choice, at which the search ends."""


def even_shares(pools: Runs, pool_bytes: Column, num_hosts: int) -> ByteShares:
    """Return the bytes that each host of each pool sends, `[n]` like `pools.values`.

    `pools` has the hosts of each pool, at least one, shape `[n, 1]`; `pool_bytes` is `[num_pools]`, and the
    shares of a pool add up to it. Deterministic.
    """
    hosts, lengths = pools.values[:, 0], pools.lengths
    alike = [np.flatnonzero(lengths == length) for length in np.unique(lengths).tolist()]
    entries = [pools.begin[same][:, None] + np.arange(lengths[same[0]]) for same in alike]
    totals = [pool_bytes[same].astype(np.float64) for same in alike]
    shares = np.empty(len(hosts))
    for entry, total in zip(entries, totals, strict=True):
        shares[entry] = (total / entry.shape[1])[:, None]
    fixed: ByteShares = np.zeros(num_hosts)
    for entry, total in zip(entries, totals, strict=True):
        if entry.shape[1] == 1:
            fixed += np.bincount(hosts[entry[:, 0]], weights=total, minlength=num_hosts)
    bound = max(float(pool_bytes.sum()) / max(len(np.unique(hosts)), 1), float(fixed.max(initial=0)))
    best, least, since = shares, np.bincount(hosts, weights=shares).max(initial=0), 0
    ahead, momentum = shares, 1.0
    step = 1 / max(np.bincount(hosts).max(initial=1), 1)
    for _ in range(MAX_STEPS):
        if least <= GOOD_ENOUGH * bound or since > PATIENCE:
            break
        gradient = np.bincount(hosts, weights=ahead)[hosts]
        moved = _project(ahead - step * gradient, entries, totals)
        change = moved - shares
        faster = (1 + sqrt(1 + 4 * momentum**2)) / 2
        if gradient @ change > 0:  # momentum leads uphill
            faster, ahead = 1.0, moved
        else:
            ahead = moved + (momentum - 1) / faster * change
        shares, momentum = moved, faster
        largest = np.bincount(hosts, weights=shares).max(initial=0)
        since = 0 if largest < 0.999 * least else since + 1
        if largest < least:
            best, least = shares, largest
    return best


def _project(shares: ByteShares, entries: Sequence[Column], totals: Sequence[ByteShares]) -> ByteShares:
    """Return the nearest shares that are not negative and add up to each pool's total."""
    nearest = np.empty_like(shares)
    for entry, total in zip(entries, totals, strict=True):
        values = shares[entry]
        descending = -np.sort(-values, axis=1)
        excess = (np.cumsum(descending, axis=1) - total[:, None]) / np.arange(1, entry.shape[1] + 1)
        last = (descending > excess).cumsum(axis=1).argmax(axis=1)
        level = excess[np.arange(len(entry)), last]
        nearest[entry] = np.maximum(values - level[:, None], 0)
    return nearest
