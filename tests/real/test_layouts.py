"""State that does not divide over the slices that are left, with real processes that are killed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from real_runs import Run, finish, left_behind, start

from elastic.records import WorldFormed, of_kind
from elastic.report_schema import Recovery

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
STEPS_TO_REJOIN = 200
"""So many that a worker that starts after a loss takes part in the last ones."""

SCRIPT = """
    import time
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    import elastic

    class Points:
        def __len__(self):
            return 500
        def __getitem__(self, index):
            time.sleep(0.01)  # so that a slice is back before the run is over
            x = np.random.default_rng(index).standard_normal(4096).astype(np.float32)
            return {{"x": x, "y": x[:12] - x[12:24]}}

    def init():
        w = jnp.zeros((4096, 12), jnp.float32)
        return {{"w": w, "m": jnp.zeros_like(w), "n": jnp.zeros((), jnp.int32)}}

    def step_fn(state, batch):
        def loss_of(w):
            return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
        loss, gradient = jax.value_and_grad(loss_of)(state["w"])
        m = 0.9 * state["m"] + gradient
        return {{"w": state["w"] - 0.001 * m, "m": m, "n": state["n"] + 1}}, {{"loss": loss}}

    with elastic.session() as session:
        for world in session.worlds():
            with world:
                world.mesh({axes})
                rows = {rows}
                specs = {{"w": P(), "m": rows, "n": P()}}  # momentum in parts, each on one slice
                placed = world.shardings(specs, jax.eval_shape(init))
                state = world.restore(init, placed)
                step = jax.jit(step_fn, donate_argnums=0, out_shardings=(placed, None))
                for number, batch in world.batches(
                    Points(), global_batch=24, num_steps={steps}, batch_axis="data"
                ):
                    state, metrics = step(state, batch)
                    world.commit(number, state, metrics)
"""


def train(
    directory: Path,
    *arguments: str,
    axes: str = '{"data": -1}',
    rows: str = 'P("data")',
    steps: int = STEPS,
) -> Run:
    """A job whose momentum has 4,096 rows, which divide over 4 and 2 slices, not over 3."""
    directory.mkdir(exist_ok=True)
    script = directory / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).format(axes=axes, rows=rows, steps=steps))
    out = directory / "run"
    process = start(
        directory, "launch", "--devices-per-host", "1", "--replicas", "2", *arguments,
        "--out", str(out), "--", str(script),
    )  # fmt: skip
    return finish(process, out)


def recoveries(run: Run, steps: int = STEPS) -> tuple[Recovery, ...]:
    """The recoveries of a run that lost nothing."""
    assert run.status == 0, run.output
    report = run.report
    assert (report.steps.committed, report.steps.lost, report.steps.repeated) == (steps, 0, 0)
    assert (report.samples.lost, report.samples.repeated) == (0, 0)
    assert "broken" not in report.invariants.values(), report.invariants
    for name in ("no_step_lost", "no_step_repeated", "restored_equals_captured", "plan_minimal"):
        assert report.invariants[name] == "held", report.invariants
    assert left_behind(report.run.id) == []
    return report.recoveries


def explanations(run: Run) -> list[str]:
    return [world.explanation for world in of_kind(run.records, WorldFormed)]


@pytest.mark.family("layouts")
def test_rows_that_do_not_divide_over_the_slices_left_cost_no_step(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--slices", "4", "--fault", "host:slice=1@step=15", "--rejoin-after-steps", "5",
        steps=STEPS_TO_REJOIN,
    )  # fmt: skip
    loss, joined = recoveries(run, STEPS_TO_REJOIN)
    assert (loss.slices_after, joined.slices_after) == ((0, 2, 3), (0, 1, 2, 3))
    assert "dim 0 (4,096) of ['m'] does not divide into 3: replicated over the axis" in loss.explanation
    assert "replicated" not in joined.explanation
    for recovery in (loss, joined):
        assert recovery.bytes_moved == recovery.bytes_lower_bound > 0


@pytest.mark.family("layouts")
def test_script_with_a_rule_of_its_own_gets_a_world_planned_for_it(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--slices", "4", "--fault", "kill:slice=1+2@step=15", "--rejoin-after-steps", "never",
        "--rehearsals", "0", rows='P("data") if len(world.slices) == 4 else P()',
    )  # fmt: skip
    (loss,) = recoveries(run)
    assert (loss.lost_slices, loss.slices_after) == ((1, 2), (0, 3))
    planned, again = explanations(run)[1:]
    assert "script" not in planned  # the rows do divide over two slices
    assert again.endswith("; the state is laid out as the script did it on 2 slices before")


@pytest.mark.family("layouts")
def test_rehearsal_shows_how_the_script_lays_out_the_state_on_fewer_slices(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--slices", "3", "--fault", "kill:slice=1@step=15", "--rejoin-after-steps", "never",
        rows='P(None, "data") if len(world.slices) == 3 else P()',
    )  # fmt: skip
    (loss,) = recoveries(run)
    assert loss.slices_after == (0, 2)
    assert "the state is laid out as the script did it on 2 slices before" in loss.explanation
    assert len(explanations(run)) == 3  # the rehearsal, the first world, the one after the loss


@pytest.mark.family("layouts")
def test_slice_that_the_mesh_cannot_take_is_idle_until_the_lost_one_is_back(tmp_path: Path) -> None:
    run = train(
        tmp_path, "--slices", "4", "--fault", "kill:slice=3@step=15", "--rejoin-after-steps", "5",
        axes='{"data": -1, "expert": 2}', rows='P("expert")', steps=STEPS_TO_REJOIN,
    )  # fmt: skip
    loss, joined = recoveries(run, STEPS_TO_REJOIN)
    assert (loss.lost_slices, loss.slices_after) == ((3,), (0, 1))
    assert "data=1 on 2 slices, slice 2 idle" in loss.explanation
    assert (joined.joined_slices, joined.slices_after) == ((2, 3), (0, 1, 2, 3))
