"""Small jobs under the local adapter: a linear model on three virtual slices, and faults at chosen steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from controller_adapter.local import adapter
from controller_adapter.local.engine import LocalEngine
from controller_adapter.local.faults import inject
from elastic.cadence import EVERY_STEP, Cadence
from elastic.job import HISTORY_FILE, JobSpec, new_job_id
from elastic.records import Record, StepCommitted, WorldFormed, of_kind, read_history
from elastic.report import Report, build_report
from elastic.sessions import Session
from elastic.state import Config, Timing
from elastic.world import World

GLOBAL_BATCH = 12
Hook = Callable[[World, int], None]


class Points:
    """Samples of a linear map."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng(index)
        x = random.standard_normal(8).astype(np.float32)
        return {"x": x, "y": (x[:4] * 2 - x[4:]).astype(np.float32)}


def init_state() -> dict[str, Any]:
    return {
        "w": jnp.full((8, 4), 0.1, jnp.float32),
        "m": jnp.zeros((8, 4), jnp.float32),
        "n": jnp.zeros((12,), jnp.float32),
    }


def shardings(mesh: Mesh, *, spread: bool = False) -> dict[str, Any]:
    """The state's shardings; with `spread`, a part of it is on one slice only."""
    weights = NamedSharding(mesh, PartitionSpec(None, "model"))
    return {
        "w": weights,
        "m": weights,
        "n": NamedSharding(mesh, PartitionSpec("data" if spread else None)),
    }


def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    def loss_of(w: Any) -> Any:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    m = 0.9 * state["m"] + gradient
    return {"w": state["w"] - 0.05 * m, "m": m, "n": state["n"] + 1}, {"loss": loss}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a job."""

    records: list[Record]
    losses: dict[int, float] = field(default_factory=dict)
    attempts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def report(self) -> Report:
        return build_report(self.records)

    @property
    def worlds(self) -> list[WorldFormed]:
        return of_kind(self.records, WorldFormed)


def make_spec(directory: Path, root: Path, *, cadence: Cadence = EVERY_STEP, **config: Any) -> JobSpec:
    timing = Timing(wait_s=config.pop("wait_s", 5.0), gather_s=0.1)
    settings = {"num_slices": 3, "devices_per_host": 2, "replicas": 3, "rejoin_after_steps": None} | config
    return JobSpec(
        job_id=new_job_id(),
        directory=directory,
        adapter="local",
        in_place="proven",
        simulated_faults=True,
        command=("test",),
        service_command=(),
        config=Config(**settings, timing=timing),
        shm_root=root,
        cadence=cadence,
        worker_stopped_s=0.15,
    )


def open_session(spec: JobSpec) -> Session:
    return Session(spec, *adapter().connect(spec, 0))


def train(
    session: Session, steps: int, hook: Hook = lambda world, step: None, *, spread: bool = False
) -> None:
    """The loop that any user would write; `hook` is called while each step runs."""
    with session:
        for world in session.worlds():
            with world:
                mesh = world.mesh({"data": -1, "model": 2})
                state = world.restore(init_state, shardings(mesh, spread=spread))
                step_fn = jax.jit(
                    train_step, donate_argnums=0, out_shardings=(shardings(mesh, spread=spread), None)
                )
                for step, batch in world.batches(Points(), global_batch=GLOBAL_BATCH, num_steps=steps):
                    state, metrics = step_fn(state, batch)
                    hook(world, step)
                    world.commit(step, state, metrics)


def faults_at(
    faults: Mapping[tuple[int, int], tuple[Any, ...]], then: Hook = lambda world, step: None
) -> Hook:
    """A hook that causes `(kind, *slices)` while `(generation, step)` runs."""

    def hook(world: World, step: int) -> None:
        if (world.generation, step) in faults:
            inject(*faults[world.generation, step])
        then(world, step)

    return hook


def run(
    spec: JobSpec,
    steps: int = 12,
    faults: Mapping[tuple[int, int], tuple[Any, ...]] | None = None,
    *,
    spread: bool = False,
    hook: Hook = lambda world, step: None,
) -> Outcome:
    attempts: list[tuple[int, int]] = []

    def note(world: World, step: int) -> None:
        attempts.append((world.generation, step))
        hook(world, step)

    train(open_session(spec), steps, faults_at(faults or {}, note), spread=spread)
    return outcome(spec, attempts)


def wait_until_persisted(step: int, bound_s: float = 60.0) -> Hook:
    """A hook that lets the world go on two steps after `step` only when that is in the persistent tier."""

    def hook(world: World, now_at: int) -> None:
        until_s = time.monotonic() + bound_s
        engine: LocalEngine = world._link.engine  # type: ignore[attr-defined]
        while now_at == step + 2 and step not in [one.step for one in engine._state.persisted]:
            assert time.monotonic() < until_s, f"step {step} is not in the persistent tier"
            engine.pump(0.02)

    return hook


def outcome(spec: JobSpec, attempts: list[tuple[int, int]] | None = None) -> Outcome:
    records = list(read_history(spec.directory / HISTORY_FILE))
    losses = {r.step: r.loss for r in of_kind(records, StepCommitted) if r.loss is not None}
    return Outcome(records=records, losses=losses, attempts=attempts or [])
