"""Compiling the programs of the next smaller and larger world before they are needed, beside the world that
trains.

A shadow group is one process of the script on as many hosts as that world has slices. They form a world of
their own with its ranks, with a fresh state, make one step and end; what that leaves is the entry in the
compile cache. Nothing of it is captured, journalled or committed, and it ends at once when a recovery begins.
Slices of several hosts have no shadow groups.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.records import ShadowCompiled
from elastic.shadow_events import (
    EndShadow,
    EndShadowService,
    EnterShadow,
    ShadowServiceReady,
    ShadowTold,
    StartShadow,
    StartShadowService,
)
from elastic.turn import Turn

CALM_STEPS = 3
"""New steps of a world before a group is started."""


def look(turn: Turn) -> None:
    """In a world that trains: start the group that is due, give one up that does not get on."""
    state = turn.state
    shadow = state.shadow
    if not state.config.precompile or state.config.hosts_per_slice > 1:
        return
    if shadow.slices:
        away = [index for index in shadow.slices if not state.member(index).attached]
        if away:
            _end(turn, "failed", f"the host of slice {away[0]} is away")
        elif turn.is_past(shadow.began_s + state.config.timing.shadow_s):
            _end(turn, "failed", "it took too long")
        return
    if state.newest_committed < state.newest_before + CALM_STEPS:
        return
    here = (*state.world, *(m.index for m in state.members if m.index not in state.world))
    attached = tuple(index for index in here if state.member(index).attached)
    config = state.config
    size = shadow.next_size(
        len(state.world_slices), config.min_slices, config.num_slices, len(attached), state.generation
    )
    if size is not None:
        _begin(turn, attached[:size])


def note_compiled(turn: Turn, num_slices: int) -> None:
    """A world of so many slices has made a step: its programs are in the cache."""
    shadow = turn.state.shadow
    turn.change(shadow=replace(shadow, compiled=shadow.compiled | {num_slices}))


def hear(turn: Turn, event: ShadowTold) -> None:
    """One process has got on, or not."""
    shadow = turn.state.shadow
    if event.number != shadow.number or event.member not in shadow.slices:
        return
    if event.state in ("failed", "skipped"):
        _end(turn, event.state, f"slice {event.member}: {event.detail}")
    elif (event.state == "done") == shadow.is_entered:
        turn.change(shadow=replace(shadow, missing=shadow.missing - {event.member}))
        _go_on(turn)


def hear_service(turn: Turn, event: ShadowServiceReady) -> None:
    """The group's runtime service is up, or is none."""
    shadow = turn.state.shadow
    if event.number != shadow.number or not shadow.slices:
        return
    if event.failed:
        _end(turn, "failed", "its runtime service ended")
    else:
        turn.change(shadow=replace(shadow, service_address=event.address))
        _go_on(turn)


def give_up(turn: Turn) -> None:
    """The world is left, or the job ends: the group with it."""
    if turn.state.shadow.slices:
        _end(turn, "given up", "the world changed")


def _begin(turn: Turn, slices: tuple[int, ...]) -> None:
    shadow = turn.state.shadow.begun(slices, turn.now.mono_s)
    turn.change(shadow=shadow)
    turn.send(StartShadowService(number=shadow.number, num_processes=len(slices)))
    for index in slices:
        turn.send(StartShadow(member=index, number=shadow.number))


def _go_on(turn: Turn) -> None:
    shadow = turn.state.shadow
    if shadow.missing or shadow.service_address is None:
        return
    if shadow.is_entered:
        note_compiled(turn, len(shadow.slices))
        _end(turn, "compiled", "")
        return
    turn.change(shadow=replace(shadow, is_entered=True, missing=frozenset(shadow.slices)))
    for rank, index in enumerate(shadow.slices):
        turn.send(
            EnterShadow(
                member=index,
                number=shadow.number,
                rank=rank,
                slices=shadow.slices,
                service_address=shadow.service_address,
            )
        )


def _end(turn: Turn, outcome: str, detail: str) -> None:
    state, shadow = turn.state, turn.state.shadow
    turn.write(
        ShadowCompiled(
            unix_s=turn.now.unix_s,
            generation=state.generation,
            num_slices=len(shadow.slices),
            took_s=turn.now.mono_s - shadow.began_s,
            outcome=outcome,
            detail=detail,
        )
    )
    for index in shadow.slices:
        turn.send(EndShadow(member=index, number=shadow.number))
    turn.send(EndShadowService(number=shadow.number))
    if outcome in ("failed", "skipped"):
        shadow = replace(shadow, tried=shadow.tried | {(state.generation, len(shadow.slices))})
        turn.change(shadow=shadow)
    turn.change(shadow=turn.state.shadow.ended())
