"""Which digests an agent computes without being asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agent_arenas import GENERATION, layout_of_hosts, made_arenas

from elastic.agent_own_digest import OwnDigest
from elastic.agent_tasks import ArenaTasks
from elastic.events import ComputeDigest, SnapshotSummary, WorldSpec
from reshard.ids import HostId
from snapshot.arena import Arena

STEP = 3
WORLD = WorldSpec(
    generation=GENERATION,
    rank=0,
    slices=(0, 1),
    hosts_per_slice=1,
    service_address="",
    restore_step=STEP,
    restore_generation=1,
    restore_position=0,
    newest_committed=STEP,
    rehearsal=False,
    replicas=2,
    persists=False,
    audit_every=None,
)


def summary(arena: Arena) -> SnapshotSummary:
    found = ArenaTasks(arena, 0).summary_of(STEP, GENERATION)
    assert found is not None
    return found


def wanted(arena: Arena, world: WorldSpec = WORLD) -> ComputeDigest | None:
    own = OwnDigest(0, HostId(0))
    own.entered(world)
    return own.restored(summary(arena))


def test_first_host_of_a_world_computes_the_digest_of_what_it_has_alone() -> None:
    with made_arenas(layout_of_hosts(1), 1, STEP) as made:
        command = wanted(made[HostId(0)])
        assert command is not None
        assert (command.purpose, command.generation, command.step) == ("restored", GENERATION, STEP)
        assert ArenaTasks(made[HostId(0)], 0).digest_now(command).digest


@pytest.mark.parametrize("world", [replace(WORLD, rank=1), replace(WORLD, rehearsal=True)])
def test_other_host_or_rehearsal_computes_none(world: WorldSpec) -> None:
    with made_arenas(layout_of_hosts(1), 1, STEP) as made:
        assert wanted(made[HostId(0)], world) is None


def test_host_that_has_a_part_of_the_state_leaves_it_to_the_coordinator() -> None:
    with made_arenas(layout_of_hosts(2), 1, STEP) as made:
        assert wanted(made[HostId(0)]) is None


def test_own_digest_is_computed_once_and_not_again_when_asked_for() -> None:
    with made_arenas(layout_of_hosts(1), 1, STEP) as made:
        own = OwnDigest(0, HostId(0))
        own.entered(WORLD)
        command = own.restored(summary(made[HostId(0)]))
        assert command is not None
        assert own.is_begun(command)
        assert own.restored(summary(made[HostId(0)])) is None
        assert not own.is_begun(replace(command, purpose="captured"))
        assert not own.is_begun(replace(command, generation=GENERATION + 1))
