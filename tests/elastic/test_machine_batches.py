"""What a world is told of the steps that it runs again: in which world, of how many slices, each was new."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from model_job import Job
from test_machine_simulation import BOUND_S, build_job

from reshard.batch_sizes import NewSteps, world_of

SEEDS_PER_TEST = 25
NUM_SEEDS = 3 * settings().max_examples
Owner = tuple[int, int]


class Owners:
    """Which world committed each step first, as the coordinator heard it: generation and number of slices."""

    def __init__(self, job: Job) -> None:
        self.by_step: list[Owner] = []
        self._world: Owner = (0, 0)
        job.when(self._look, lambda: None)

    def _look(self, job: Job) -> bool:
        state = job.state
        owner = state.world_generation, len(state.world)
        # A new world is only decided, and may know from a snapshot of a step that nobody told: it is of the
        # world before.
        new = owner if owner[0] == self._world[0] else self._world
        self.by_step += [new] * (state.newest_committed + 1 - len(self.by_step))
        self._world = owner
        return False


def check(seed: int) -> int:
    """Run a seed; returns how many steps other worlds than the first one made first."""
    job = build_job(seed)
    owners = Owners(job)
    job.run(until_s=BOUND_S)
    specs = [world.spec for world in job.worlds.values() if not world.spec.rehearsal]
    for spec in specs:
        restored = -1 if spec.restore_step is None else spec.restore_step
        replayed = range(restored + 1, spec.newest_committed + 1)
        assert [owner_of(spec.new_steps, step) for step in replayed] == [
            owners.by_step[step] for step in replayed
        ], f"seed {seed}"
        assert owner_of(spec.new_steps, spec.newest_committed + 1) == (spec.generation, len(spec.slices))
    found = [owner_of(job.state.new_steps, step) for step in range(len(owners.by_step))]
    assert found == owners.by_step, f"seed {seed}"
    return sum(owner != found[0] for owner in found)


def owner_of(worlds: Sequence[NewSteps], step: int) -> Owner:
    world = world_of(worlds, step)
    return world.generation, world.num_slices


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_machine_knows_which_world_made_each_step_first_under_random_faults(first: int) -> None:
    assert sum(check(seed) for seed in range(first, first + SEEDS_PER_TEST)) > 2 * SEEDS_PER_TEST
