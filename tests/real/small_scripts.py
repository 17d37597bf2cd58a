"""A small training script in which a test makes trouble of its own kind at one step."""

from __future__ import annotations

import textwrap
from pathlib import Path

from real_runs import Run, finish, start

STEPS = 40
SCRIPT = """
import os, pathlib, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import elastic

FLAG = pathlib.Path(FLAG_PATH)
SLICE = os.environ["ELASTIC_SLICE"]
PREPARE


def trouble():
    BODY


def loss_of(step):
    return LOSS


class Numbers:
    def __len__(self):
        return 96

    def rows(self, ids):
        READ
        return {"x": np.asarray(ids, np.float32)}


dataset = Numbers()
with elastic.session() as session:
    for world in session.worlds():
        with world:
            mesh = world.mesh({"data": -1})
            state = world.restore(lambda: jnp.zeros(8), NamedSharding(mesh, P()))
            update = jax.jit(lambda state, x: state + x.mean(), donate_argnums=0)
            for step, batch in world.batches(dataset, global_batch=24, num_steps=NUM_STEPS):
                if step == 6:
                    trouble()
                state = update(state, batch["x"])
                world.commit(step, state, {"loss": loss_of(step)})
"""


def launch(
    tmp_path: Path,
    body: str,
    *options: str,
    prepare: str = "",
    loss: str = "1.0",
    read: str = "pass",
    steps: int = STEPS,
) -> Run:
    """Run the script to its end.

    `body` is done before step 6, `prepare` at the start, `read` for every batch; `loss` may name `step`.
    """
    script, out = tmp_path / "train.py", tmp_path / "run"
    parts = {
        "FLAG_PATH": repr(str(tmp_path / "flag")),
        "BODY": textwrap.indent(textwrap.dedent(body).strip(), "    ").strip(),
        "PREPARE": textwrap.dedent(prepare).strip(),
        "LOSS": loss,
        "READ": read,
        "NUM_STEPS": str(steps),
    }
    text = SCRIPT
    for name, part in parts.items():
        text = text.replace(name, part)
    script.write_text(text)
    return finish(start(out, "launch", "--out", str(out), *options, "--", str(script)), out)
