"""Jobs that lose a slice under each batch policy: the same losses, or the samples that it promises."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from local_jobs import Outcome, Points, init_state, inject, make_spec, open_session, outcome, shardings

import elastic
from elastic.cadence import EVERY_STEP, Cadence, EverySteps
from elastic.job import JobSpec
from elastic.records import StepCommitted, WorldFormed, of_kind
from reshard.batches import sample_ids
from reshard.errors import UsageError

STEPS = 12
TOLERANCE = 1e-5
"""Of a loss, relative: sums of float32 in another order. Seen: at most 3e-7 in 12 steps."""
Faults = Mapping[tuple[int, int], tuple[Any, ...]]


def losses_of(params: Any, rows: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((rows["x"] @ params - rows["y"]) ** 2, axis=-1)


def train_step(state: dict[str, Any], batch: dict[str, Any], lr_scale: float) -> Any:
    loss, gradient = elastic.mean_value_and_grad(losses_of)(state["w"], batch)
    m = 0.9 * state["m"] + gradient
    return {"w": state["w"] - 0.05 * lr_scale * m, "m": m, "n": state["n"] + 1}, {"loss": loss}


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the loop saw: the batch's shape and learning-rate factor at each attempt, programs a world."""

    shapes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    scales: dict[tuple[int, int], float] = field(default_factory=dict)
    programs: dict[int, int] = field(default_factory=dict)
    outcome: Outcome


def run(
    directory: Path, root: Path, policy: Mapping[str, Any], faults: Faults, *, cadence: Cadence, **config: Any
) -> Seen:
    spec: JobSpec = make_spec(directory, root, cadence=cadence, **config)
    seen = Seen(outcome=Outcome(records=[]))
    with open_session(spec) as session:
        for world in session.worlds():
            with world:
                mesh = world.mesh({"data": -1, "model": 2})
                placed = shardings(mesh)
                state = world.restore(init_state, placed)
                own = functools.partial(train_step)  # jit counts the programs of all who share a function
                step_fn = jax.jit(own, donate_argnums=0, out_shardings=(placed, None))
                for step, batch in world.batches(Points(), num_steps=STEPS, weight_key="weight", **policy):
                    attempt = world.generation, step
                    seen.shapes[attempt] = batch["weight"].shape
                    seen.scales[attempt] = world.lr_scale
                    state, metrics = step_fn(state, batch, world.lr_scale)
                    seen.programs[world.generation] = step_fn._cache_size()
                    if attempt in faults:
                        inject(*faults[attempt])
                    world.commit(step, state, metrics)
    seen.outcome = outcome(spec)
    return seen


def plain_losses(counts: list[int], scales: list[float]) -> list[float]:
    """The losses on one device, without an engine, for steps of so many samples of the stream."""
    state, position, losses = init_state(), 0, []
    for count, scale in zip(counts, scales, strict=True):
        ids, _ = sample_ids(0, position, count, len(Points()))
        rows = [Points()[int(index)] for index in ids]
        batch = {key: np.stack([row[key] for row in rows]) for key in ("x", "y")}
        state, metrics = train_step(state, batch | {"weight": np.ones(count, np.float32)}, scale)
        losses.append(float(metrics["loss"]))
        position += count
    return losses


def assert_nothing_lost(seen: Seen, consumed: int) -> None:
    report = seen.outcome.report
    assert report.run.outcome == "completed", report.run.error
    assert (report.steps.committed, report.steps.lost, report.steps.repeated) == (STEPS, 0, 0)
    assert (report.samples.consumed, report.samples.lost, report.samples.repeated) == (consumed, 0, 0)
    assert set(report.invariants.values()) == {"held"}


def counts_of(seen: Seen) -> list[int]:
    """The samples of each step, as they were committed last."""
    commits = of_kind(seen.outcome.records, StepCommitted)
    return list({commit.step: len(commit.sample_ids) for commit in sorted(commits, key=_age)}.values())


def _age(commit: StepCommitted) -> tuple[int, int]:
    return commit.step, commit.generation


# ---- the global batch stays --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "shapes"),
    [
        ({"global_batch": 13}, [(15,), (14,)]),
        ({"global_batch": 12, "max_rows_per_device": 4}, [(1, 12), (2, 6)]),
        ({"global_batch": 13, "max_rows_per_device": 3}, [(2, 9), (3, 6)]),
    ],
    ids=["padding", "micro-batches", "both"],
)
def test_losses_are_those_of_the_undisturbed_run_when_a_slice_is_lost(
    tmp_path: Path, root: Path, policy: dict[str, int], shapes: list[tuple[int, ...]]
) -> None:
    seen = run(tmp_path, root, policy, {(1, 7): ("kill", 1)}, cadence=EverySteps(steps=4))
    batch = policy["global_batch"]
    assert_nothing_lost(seen, STEPS * batch)
    assert seen.outcome.report.steps.replayed == 3
    losses = [seen.outcome.losses[step] for step in range(STEPS)]
    assert losses == pytest.approx(plain_losses([batch] * STEPS, [1.0] * STEPS), rel=TOLERANCE)
    by_world = [{seen.shapes[key] for key in seen.shapes if key[0] == generation} for generation in (1, 2)]
    assert by_world == [{shape} for shape in shapes]
    assert seen.programs == {1: 1, 2: 1}


# ---- the slices' batch stays -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bound", [{}, {"max_rows_per_device": 4}, {"max_rows_per_device": 3}], ids=["flat", "micro", "uneven"]
)
def test_slice_batch_runs_old_steps_again_as_they_were_and_new_ones_smaller(
    tmp_path: Path, root: Path, bound: dict[str, int]
) -> None:
    policy = {"slice_batch": 4, "lr_rule": "linear", **bound}
    seen = run(tmp_path, root, policy, {(1, 7): ("kill", 1)}, cadence=EverySteps(steps=4))
    counts = [12] * 7 + [8] * 5
    scales = [count / 12 for count in counts]
    assert_nothing_lost(seen, sum(counts))
    assert counts_of(seen) == counts
    assert seen.outcome.report.steps.replayed == 3
    assert {step: scale for (world, step), scale in seen.scales.items() if world == 2} == {
        step: scales[step] for step in range(4, STEPS)
    }
    losses = [seen.outcome.losses[step] for step in range(STEPS)]
    assert losses == pytest.approx(plain_losses(counts, scales), rel=TOLERANCE)
    assert seen.programs == {1: 1, 2: 2}  # one for the larger batches that run again


def test_slice_batch_grows_with_a_slice_that_comes_back(tmp_path: Path, root: Path) -> None:
    policy = {"slice_batch": 4, "lr_rule": "sqrt"}
    faults = {(1, 4): ("kill", 1)}
    seen = run(tmp_path, root, policy, faults, cadence=EVERY_STEP, rejoin_after_steps=2)
    assert [len(world.slices) for world in of_kind(seen.outcome.records, WorldFormed)] == [3, 2, 3]
    counts = counts_of(seen)
    assert (counts[:5], counts[-1]) == ([12] * 4 + [8], 12)
    assert_nothing_lost(seen, sum(counts))
    scales = [(count / 12) ** 0.5 for count in counts]
    losses = [seen.outcome.losses[step] for step in range(STEPS)]
    assert losses == pytest.approx(plain_losses(counts, scales), rel=TOLERANCE)
    assert seen.programs == {1: 1, 2: 1, 3: 1}


def test_beginning_of_a_step_that_was_never_committed_binds_nobody(tmp_path: Path, root: Path) -> None:
    """Slice 1 has the journal of step 5 at three slices; 0 and 2 then commit it, 1 and 2 run it again."""
    policy = {"slice_batch": 4, "lr_rule": "none"}
    faults = {(1, 5): ("stop", 1), (2, 7): ("stop", 0)}
    seen = run(tmp_path, root, policy, faults, cadence=EverySteps(steps=100), rejoin_after_steps=1)
    third = of_kind(seen.outcome.records, WorldFormed)[2]
    assert (third.slices, third.restored_step, third.newest_committed) == ((1, 2), 0, 6)
    counts = counts_of(seen)
    assert counts[:7] == [12] * 5 + [8] * 2
    assert_nothing_lost(seen, sum(counts))


def test_slice_batch_asks_for_a_rule_and_weights(tmp_path: Path, root: Path) -> None:
    with pytest.raises(UsageError, match="how the learning rate follows"):
        run(tmp_path, root, {"slice_batch": 4}, {}, cadence=EVERY_STEP)
