"""Which worlds a process plays alone."""

from __future__ import annotations

import pytest

from elastic.solo_worlds import MAX_PROCESSES, sizes_ahead, solo_world
from elastic.state import Config


@pytest.mark.parametrize(
    ("config", "size", "sizes"),
    [
        (Config(num_slices=4), 4, (4, 3)),
        (Config(num_slices=4), 3, (4, 3)),
        (Config(num_slices=4), 2, (3, 2, 4)),
        (Config(num_slices=4, min_slices=4), 4, (4,)),
        (Config(num_slices=1), 1, (1,)),
        (Config(num_slices=MAX_PROCESSES + 1), MAX_PROCESSES + 1, (MAX_PROCESSES,)),
        (Config(num_slices=33, hosts_per_slice=2), 33, (32,)),
    ],
)
def test_sizes_ahead_are_those_of_a_loss_of_a_return_and_of_now(
    config: Config, size: int, sizes: tuple[int, ...]
) -> None:
    assert sizes_ahead(config, size) == sizes


def test_solo_world_is_a_rehearsal_of_all_hosts_for_the_first_of_them() -> None:
    world = solo_world(Config(num_slices=3, hosts_per_slice=2), 2, 7)
    assert (world.generation, world.rank, world.slices, len(world.hosts)) == (7, 0, (0, 1), 4)
    assert (world.rehearsal, world.solo, world.restore_step) == (True, True, None)
