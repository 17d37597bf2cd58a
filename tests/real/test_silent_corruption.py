"""A bit flips in one process's copy of the state, and nothing fails: it is named all the same."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from real_runs import Run, assert_nothing_lost, finish, left_behind, start

from elastic.records import CopiesCompared, CorruptionSuspected, LossDetected, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

FLIP_AT = 20
STEPS = 150
"""Enough for a worker to start again meanwhile."""

SCRIPT = """
    import os, pathlib, time
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    import elastic

    FLAG = pathlib.Path({flag!r})

    class Points:
        def __len__(self):
            return 400
        def __getitem__(self, index):
            x = np.random.default_rng(index).standard_normal(64).astype(np.float32)
            return {{"x": x, "y": x[:8] - x[8:16]}}

    def init():
        return {{"w": jnp.zeros((64, 8), jnp.float32), "n": jnp.zeros((), jnp.int32)}}

    def step_fn(state, batch):
        def loss_of(w):
            return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
        loss, gradient = jax.value_and_grad(loss_of)(state["w"])
        return {{"w": state["w"] - 0.1 * gradient, "n": state["n"] + 1}}, {{"loss": loss}}

    def flip(array):
        shards = []
        for place, shard in enumerate(array.addressable_shards):
            value = np.array(shard.data)
            if place == 0:
                value.reshape(-1).view(np.uint8)[2] ^= 0x20
            shards.append(jax.device_put(value, shard.device))
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

    with elastic.session() as session:
        for world in session.worlds():
            with world:
                mesh = world.mesh({{"data": -1}})
                everywhere = NamedSharding(mesh, PartitionSpec())
                placed = {{"w": everywhere, "n": everywhere}}
                state = world.restore(init, placed)
                step = jax.jit(step_fn, donate_argnums=0, out_shardings=(placed, None))
                for number, batch in world.batches(Points(), global_batch=12, num_steps={steps}):
                    state, metrics = step(state, batch)
                    jax.block_until_ready(state)
                    time.sleep({pause_s} * (1 if len(world.slices) == 3 else 3))
                    if number == {flip_at} and os.environ["ELASTIC_SLICE"] == "1" and not FLAG.exists():
                        FLAG.touch()
                        state = {{**state, "w": flip(state["w"])}}
                    world.commit(number, state, metrics)
"""


def launch(tmp_path: Path, *options: str, pause_s: float = 0.0, steps: int = 40) -> Run:
    script, directory = tmp_path / "train.py", tmp_path / "run"
    flag = str(tmp_path / "flag")
    script.write_text(
        textwrap.dedent(SCRIPT).format(flip_at=FLIP_AT, pause_s=pause_s, steps=steps, flag=flag)
    )
    wanted = ("--slices", "3", "--devices-per-host", "2", "--out", str(directory), *options)
    return finish(start(tmp_path, "launch", *wanted, "--", str(script)), directory)


@pytest.mark.family("silent corruption")
def test_slice_with_a_flipped_bit_is_thrown_out_and_comes_back_with_the_state_of_the_others(
    tmp_path: Path,
) -> None:
    run = launch(tmp_path, "--rejoin-after-steps", "3", pause_s=0.1, steps=STEPS)
    assert_nothing_lost(run, steps=STEPS)
    (loss,) = of_kind(run.records, LossDetected)
    assert (loss.slice_index, loss.detector) == (1, "checksum")
    assert loss.cause == f"its copy of ['w'] of step {FLIP_AT} differs from the majority's"
    smaller = run.report.recoveries[0]
    assert (smaller.lost_slices, smaller.slices_after, smaller.restored_step) == ((1,), (0, 2), FLIP_AT - 1)
    assert run.report.recoveries[-1].slices_after == (0, 1, 2)
    assert "SILENT CORRUPTION" in run.output
    assert left_behind(run.report.run.id) == []


@pytest.mark.family("silent corruption")
def test_flipped_bit_in_one_process_is_named_by_step_array_slice_and_device(tmp_path: Path) -> None:
    run = launch(tmp_path, "--on-corruption", "warn", "--replicas", "2", "--audit-every", "10")
    assert run.status == 3, run.output  # an invariant is broken, and the run is complete
    assert run.report.run.outcome == "completed"
    assert run.report.broken == ("copies_agree",)
    findings = of_kind(run.records, CorruptionSuspected)
    assert findings
    assert all(record.step >= FLIP_AT and 1 in record.suspects for record in findings)
    (corruption,) = run.report.snapshots.corruptions
    assert (corruption.path, corruption.suspects, corruption.devices) == ("['w']", (1,), (2,))
    assert corruption.is_majority
    assert corruption.first_step < 30  # the audit of step 29 comes whether a capture has two copies or not
    audits = [record for record in of_kind(run.records, CopiesCompared) if record.is_audit]
    assert len(audits) in (4, 5)  # each tenth step, and the one that was ordered
    assert "SILENT CORRUPTION" in run.output
    assert left_behind(run.report.run.id) == []
