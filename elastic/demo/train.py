"""The demo's training script: a byte-level transformer on real text, in the loop that any user would
write.
"""

from __future__ import annotations

from pathlib import Path

import click

import elastic
from elastic.demo.text import TextWindows

GLOBAL_BATCH = 48


@click.command()
@click.option(
    "--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Optimizer steps in all."
)
@click.option("--data", type=click.Path(path_type=Path), default=None, help="A text file or folder.")
@click.option(
    "--model-axis",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Devices that share a layer.",
)
def main(steps: int, data: Path | None, model_axis: int) -> None:
    """Train under the engine; the launcher starts one of these on each host."""
    from elastic.demo.model import DEMO, init_state, make_train_step, state_shardings

    dataset = TextWindows(data, sequence_length=DEMO.sequence_length)
    with elastic.session() as session:
        for world in session.worlds():
            with world:
                mesh = world.mesh({"data": -1, "model": model_axis})
                state = world.restore(init_state, state_shardings(mesh))
                train_step = make_train_step(mesh)
                batches = world.batches(
                    dataset, global_batch=GLOBAL_BATCH, num_steps=steps, weight_key="weight"
                )
                for step, batch in batches:
                    state, metrics = train_step(state, batch)
                    world.commit(step, state, metrics)


if __name__ == "__main__":
    main()
