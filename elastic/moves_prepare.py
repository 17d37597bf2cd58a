"""What can be done for a slice before it has a part in the world, so that the others do not wait for it.

Its worker is at its session by then. Its host makes room for its snapshots, which for large ones takes
seconds (the memory is new). A spare is prepared when it begins to wait.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.events import WorkerState
from elastic.join_events import HostPrepared, PrepareHost
from elastic.turn import Turn
from reshard.ids import HostId
from reshard.layout import Layout


def prepare_outsiders(turn: Turn) -> None:
    """Have the hosts prepared whose worker is ready and which are not in the world."""
    state = turn.state
    layout = dict(state.layouts).get(max((number for number, _ in state.layouts), default=0))
    if layout is None:
        return
    for index in state.members_with(WorkerState.READY):
        if index not in state.world and state.member(index).prepare_by_s is None:
            turn.update(index, prepare_by_s=turn.now.mono_s + state.config.timing.prepare_s)
            turn.send(PrepareHost(member=index, layout=_with(layout, state.config.host(index))))


def is_prepared(turn: Turn, member: int) -> bool:
    """Whether nothing more can be done for a slice before it joins, or it takes too long."""
    joiner = turn.state.member(member)
    return joiner.prepared or joiner.prepare_by_s is None or turn.is_past(joiner.prepare_by_s)


def hear(turn: Turn, event: HostPrepared) -> None:
    """A host has made room, as far as it could."""
    turn.update(event.member, prepared=True)


def _with(layout: Layout, host: HostId) -> Layout:
    """The layout with this host's slice in it, in place of another if it is not."""
    mesh = layout.mesh
    if host in mesh.hosts:
        return layout
    replaced = mesh.hosts[0].slice_index
    hosts = tuple(
        HostId(host.slice_index, other.host_index) if other.slice_index == replaced else other
        for other in mesh.hosts
    )
    return replace(layout, mesh=replace(mesh, hosts=hosts))
