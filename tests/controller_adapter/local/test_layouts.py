"""Virtual slices are lost while a state is in parts that do not divide over those that are left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from local_jobs import GLOBAL_BATCH, Outcome, Points, faults_at, make_spec, open_session, outcome

from elastic.sessions import Session
from elastic.world import World
from reshard.errors import UsageError

P = PartitionSpec
STEPS = 12
ROWS = 8  # over 4, 2 and 1 slices, not over 3


def init() -> dict[str, Any]:
    return {"w": jnp.full((ROWS, 4), 0.1), "m": jnp.zeros((ROWS, 4)), "n": jnp.zeros((), jnp.int32)}


SPECS = {"w": P(None), "m": P("data"), "n": P()}


def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    def loss_of(w: Any) -> Any:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    m = 0.9 * state["m"] + gradient
    return {"w": state["w"] - 0.05 * m, "m": m, "n": state["n"] + 1}, {"loss": loss}


def train(session: Session, axes: dict[str, int], hook: Any) -> list[tuple[int, PartitionSpec]]:
    """The loop of a script that has the world choose its shardings; how `m` was partitioned in each world."""
    seen: list[tuple[int, PartitionSpec]] = []
    with session:
        for world in session.worlds():
            with world:
                world.mesh(axes)
                placed = world.shardings(SPECS, jax.eval_shape(init))
                state = world.restore(init, placed)
                seen.append((len(world.slices), state["m"].sharding.spec))
                step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(placed, None))
                batches = world.batches(
                    Points(), global_batch=GLOBAL_BATCH, num_steps=STEPS, batch_axis="data"
                )
                for step, batch in batches:
                    state, metrics = step_fn(state, batch)
                    hook(world, step)
                    world.commit(step, state, metrics)
    return seen


def run(
    tmp_path: Path, root: Path, axes: dict[str, int], faults: dict[tuple[int, int], Any], **config: Any
) -> tuple[Outcome, list[tuple[int, PartitionSpec]]]:
    settings = {"num_slices": 4, "devices_per_host": 2, "replicas": 2} | config
    spec = make_spec(tmp_path, root, **settings)
    seen = train(open_session(spec), axes, faults_at(faults))
    return outcome(spec), seen


def assert_nothing_lost(result: Outcome) -> None:
    report = result.report
    assert report.run.outcome == "completed", report.run.error
    assert (report.steps.committed, report.steps.lost, report.steps.repeated) == (STEPS, 0, 0)
    assert (report.samples.lost, report.samples.repeated) == (0, 0)
    assert set(report.invariants.values()) == {"held"}


def test_rows_that_do_not_divide_over_three_slices_are_replicated_and_in_parts_again_over_four(
    tmp_path: Path, root: Path
) -> None:
    result, seen = run(tmp_path, root, {"data": -1, "model": 2}, {(1, 4): ("kill", 1)}, rejoin_after_steps=2)
    assert_nothing_lost(result)
    assert seen == [(4, P("data")), (3, P()), (4, P("data"))]
    loss, joined = result.report.recoveries
    assert loss.explanation.endswith(
        "; data=3 on 3 slices, 1 array replicated; dim 0 (8) of ['m'] does not divide into 3: "
        "replicated over the axis."
    )
    assert "replicated" not in joined.explanation
    for recovery in (loss, joined):
        assert recovery.bytes_moved == recovery.bytes_lower_bound > 0
    # A quarter of `m`, all of `w` and the counter, to slice 1 and to one of the others: two of three slices
    # have each array in their snapshots.
    assert joined.bytes_moved == 2 * (ROWS * 4 * 4 // 4 + ROWS * 4 * 4 + 4)


def test_losses_are_those_of_an_undisturbed_run(tmp_path: Path, root: Path) -> None:
    disturbed, _ = run(tmp_path / "one", root, {"data": -1, "model": 2}, {(1, 4): ("kill", 3)})
    undisturbed, seen = run(tmp_path / "two", root, {"data": -1, "model": 2}, {})
    assert seen == [(4, P("data"))]
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=1e-3)


def test_slices_that_the_mesh_cannot_take_are_idle_and_take_part_again(tmp_path: Path, root: Path) -> None:
    # 4 places on slices of 2 devices: an even number of slices.
    axes, faults = {"data": -1, "expert": 4}, {(1, 4): ("kill", 1)}
    result, seen = run(tmp_path, root, axes, faults, rejoin_after_steps=2)
    assert_nothing_lost(result)
    assert [world.slices for world in result.worlds] == [(0, 1, 2, 3), (2, 3), (0, 1, 2, 3)]
    loss, joined = result.report.recoveries
    assert loss.explanation.endswith("; data=1 on 2 slices, slice 0 idle.")
    assert (loss.lost_slices, joined.joined_slices) == ((1,), (0, 1))
    assert seen == [(4, P("data")), (2, P("data")), (4, P("data"))]


def test_sharding_is_asked_for_after_the_mesh(tmp_path: Path, root: Path) -> None:
    def ask_early(world: World) -> None:
        with world:
            world.sharding((8,), P("data"))

    with open_session(make_spec(tmp_path, root)) as session:
        (world, *_) = [next(session.worlds())]
        with pytest.raises(UsageError, match=r"world\.sharding before world\.mesh"):
            ask_early(world)


def test_sharding_of_one_array_is_on_the_mesh_of_the_world(tmp_path: Path, root: Path) -> None:
    with open_session(make_spec(tmp_path, root)) as session:
        world = next(session.worlds())
        mesh = world.mesh({"data": -1, "model": 2})
        assert world.sharding((9, 4), P("data", "model")) == NamedSharding(mesh, P("data", "model"))
        assert world.sharding((8, 4), P("data", "model")) == NamedSharding(mesh, P(None, "model"))
