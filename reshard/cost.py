"""How long a change of topology takes on a described cluster, and what is left of the time.

Every prediction is a bound at line rate: the largest load of one host, over what that host can do. Nothing is
faster than that; what is slower (a busy network, small messages, a cold start) is not in it, except as
`request_s` and as the rates somebody measured. A phase names the host and the rate that bound it.

    transfer = max over hosts of (bytes sent, received) / network rate + requests of one host × request_s
    restore  = max over devices of the bytes of its shards / copy rate of one chip

Planning itself is not predicted: who asks has just planned, and can say how long it took. The step is in
`reshard.step_cost`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.accelerators import Accelerator
from reshard.candidates import group_arrays
from reshard.errors import UsageError
from reshard.fits import part_shape
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.sizes import format_bytes

__all__ = [
    "Phase",
    "Rates",
    "device_bytes",
    "goodput",
    "predict_restore",
    "predict_transfer",
    "ring_exchange_s",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What bounds one host, in bytes per second; None is not known, and so is what depends on it.

    `network_bytes_s` is one way and of one host, `copy_bytes_s` from host to device memory and of one chip.
    `request_s` is the cost of one request to a peer beyond its bytes.
    """

    network_bytes_s: float | None = None
    copy_bytes_s: float | None = None
    request_s: float = 0.0

    def __post_init__(self) -> None:
        rates = (self.network_bytes_s, self.copy_bytes_s)
        if any(rate is not None and not rate > 0 for rate in rates) or not self.request_s >= 0:
            raise UsageError(f"rates must be positive, got {self}")

    @classmethod
    def of(cls, accelerator: Accelerator, *, request_s: float = 0.0) -> Rates:
        """Return the published rates of an accelerator and its host."""
        return cls(
            network_bytes_s=accelerator.value("host_network_bytes_s"),
            copy_bytes_s=accelerator.value("host_copy_bytes_s"),
            request_s=request_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How long a phase takes, None when nobody can tell, and what bounds it or is missing, in words."""

    name: str
    seconds: float | None
    bound: str


def predict_transfer(
    rates: Rates, sent: Mapping[HostId, int], received: Mapping[HostId, int], *, num_requests: int = 0
) -> Phase:
    """Return the time to move a plan's bytes: `sent` and `received` over the network by each host.

    Hosts send and receive at once. `num_requests` is the largest number that one host makes.
    """
    loads = [(nbytes, host, "sends") for host, nbytes in sorted(sent.items())]
    loads += [(nbytes, host, "receives") for host, nbytes in sorted(received.items())]
    nbytes, busiest, verb = max(loads, key=lambda load: load[0], default=(0, None, ""))
    if not nbytes:
        return Phase(name="transfer", seconds=0.0, bound="nothing crosses the network")
    load = f"{busiest} {verb} {format_bytes(nbytes)}"
    if rates.network_bytes_s is None:
        return Phase(name="transfer", seconds=None, bound=f"{load}; the host's network rate is not known")
    seconds = nbytes / rates.network_bytes_s + num_requests * rates.request_s
    return Phase(name="transfer", seconds=seconds, bound=f"{load} at {format_bytes(rates.network_bytes_s)}/s")


def predict_restore(rates: Rates, nbytes: int) -> Phase:
    """Return the time to copy `nbytes`, the most that one device needs, from host to device memory."""
    load = f"{format_bytes(nbytes)} to each device"
    if not nbytes:
        return Phase(name="restore", seconds=0.0, bound="the state is empty")
    if rates.copy_bytes_s is None:
        return Phase(name="restore", seconds=None, bound=f"{load}; the rate from host to device is not known")
    return Phase(
        name="restore",
        seconds=nbytes / rates.copy_bytes_s,
        bound=f"{load} at {format_bytes(rates.copy_bytes_s)}/s",
    )


def ring_exchange_s(nbytes: int, *, num_slices: int, num_hosts: int, network_bytes_s: float) -> float:
    """Return the seconds to sum `nbytes`, which every slice has, over the slices; hosts take equal parts.

    2 (S - 1) / S × bytes / (hosts of a slice × network rate), S slices: that of a ring, which no all-reduce
    undercuts. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
    workstations, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
    """
    hosts_per_slice = num_hosts / num_slices
    return 2 * (num_slices - 1) / num_slices * nbytes / (hosts_per_slice * network_bytes_s)


def device_bytes(layout: Layout) -> int:
    """Return the bytes of the state on the fullest device, padding included."""
    sizes = layout.mesh.sizes()
    return sum(
        len(paths) * math.prod(part_shape(alike.shape, alike.spec, sizes)) * alike.itemsize
        for alike, paths in group_arrays(layout.arrays).items()
    )


def goodput(
    *, mtbf_s: float, downtime_s: float, slow_s: float = 0.0, slow_ratio: float = 1.0, overhead: float = 0.0
) -> float:
    """Return the part of time that makes progress, as that of an undisturbed cluster of full size.

    Every `mtbf_s` a slice is lost: `downtime_s` goes without a new step, then for `slow_s` (until the slice
    is back) steps take `slow_ratio` times as long. `overhead` is the part of each step spent on snapshots.
    """
    if not mtbf_s > 0 or downtime_s < 0 or slow_s < 0 or slow_ratio < 1 or not 0 <= overhead < 1:
        raise UsageError(
            f"no goodput: a loss every {mtbf_s} s, {downtime_s} s down, {slow_s} s at {slow_ratio} × a step"
        )
    down = min(downtime_s, mtbf_s)
    slow = min(slow_s, mtbf_s - down)
    return (mtbf_s - down - slow + slow / slow_ratio) / mtbf_s * (1 - overhead)
