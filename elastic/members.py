"""The numbers of a job's hosts: what agents, workers and commands are addressed by.

A *member* is a host. Members are numbered densely, slice by slice, in each slice host by host; with one host
a slice the number of a member is the index of its slice.
"""

from __future__ import annotations

from reshard.ids import HostId


def host_of(member: int, hosts_per_slice: int) -> HostId:
    """The host that is member number `member`."""
    return HostId(*divmod(member, hosts_per_slice))


def member_of(host: HostId, hosts_per_slice: int) -> int:
    """The number of a host."""
    return host.slice_index * hosts_per_slice + host.host_index


def name_of(host: HostId, hosts_per_slice: int) -> str:
    """A host for a sentence: `slice 1`, or `slice 1 host 0` where a slice has several."""
    return f"slice {host.slice_index}" + (f" host {host.host_index}" if hosts_per_slice > 1 else "")


def label_of(host: HostId, hosts_per_slice: int) -> str:
    """A host in the name of a file: `1`, or `1-0` where a slice has several."""
    return str(host.slice_index) if hosts_per_slice == 1 else f"{host.slice_index}-{host.host_index}"
