"""Persisting what arenas hold, as agents do it, but in this process; and small jobs without JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reshard.boxes import full_box, relative_slices
from reshard.execute import element_dtype
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.persist_shares import persist_shares
from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.contents import open_source
from snapshot.manifest import make_static
from snapshot.persist import begin
from snapshot.persist_finish import finish
from snapshot.persist_format import PersistFacts
from snapshot.persist_list import Persisted
from snapshot.persist_store import write_shards
from snapshot.persist_tree import TreeDescription, description_of
from snapshot.slot import write_slot


def captured_by(arenas: list[Arena], step: int) -> dict[HostId, list[tuple[str, Any]]]:
    return {
        arena.host: [
            (entry.path, entry.box)
            for manifest in arena.manifests().complete
            if manifest.step == step
            for entry in manifest.static.shards
        ]
        for arena in arenas
    }


def dealt(captured: dict[HostId, list[tuple[str, Any]]]) -> dict[HostId, list[tuple[str, Any]]]:
    """Give each shard to one of the hosts that captured it, by turns."""
    shares: dict[HostId, list[tuple[str, Any]]] = {host: [] for host in captured}
    for turn, shard in enumerate(sorted({shard for shards in captured.values() for shard in shards})):
        hosts = [host for host, shards in captured.items() if shard in shards]
        shares[hosts[turn % len(hosts)]].append(shard)
    return shares


def facts_of(
    layout: Layout,
    tree: TreeDescription | None = None,
    *,
    step: int = 1,
    generation: int = 1,
    epoch: int = 1,
) -> PersistFacts:
    tree = tree or description_of([array.path for array in layout.arrays])
    return PersistFacts(
        step=step,
        generation=generation,
        position=8 * step,
        layout=layout,
        tree=tree,
        epoch=epoch,
        extra={"seed": 7},
    )


def write_all(root: Path, arenas: list[Arena], facts: PersistFacts) -> Path:
    staging = begin(root, facts.step, facts.generation)
    shares = dealt(captured_by(arenas, facts.step))
    for arena in arenas:
        source = open_source(arena.slot_files(), facts.step, (facts.generation,))
        write_shards(staging, facts.layout, facts.tree, shares[arena.host], source)
        source.close()
    return staging


def persist(
    root: Path, arenas: list[Arena], facts: PersistFacts, restored_steps: Mapping[int, int] | None = None
) -> Persisted:
    root.mkdir(exist_ok=True)
    return finish(root, write_all(root, arenas, facts), facts, restored_steps=restored_steps)


def tiny_layout() -> Layout:
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=(HostId(0), HostId(1)))
    return Layout(
        mesh=mesh,
        arrays=(
            ArrayLayout(path="['b'][0]", shape=(5,), dtype="int8", itemsize=1),
            ArrayLayout(path="['empty']", shape=(0, 3), dtype="float32", itemsize=4),
            ArrayLayout(path="['n']", shape=(), dtype="int32", itemsize=4),
            ArrayLayout(path="['raw']", shape=(4,), dtype="float8_e4m3", itemsize=1, spec=(("data",),)),
            ArrayLayout(path="['time']", shape=(2,), dtype="datetime64[s]", itemsize=8),
            ArrayLayout(path="['w'].mu", shape=(4, 3), dtype="float32", itemsize=4, spec=(("data",),)),
        ),
        elastic_axis="data",
    )


def tiny_array(array: ArrayLayout, step: int) -> np.ndarray[Any, Any]:
    """Return the elements of an array at a step, as opaque values; zeros at step 0."""
    seed = [step, len(array.path), array.nbytes]
    data = np.random.default_rng(seed).bytes(array.nbytes) if step else bytes(array.nbytes)
    return np.frombuffer(data, element_dtype(array.itemsize)).reshape(array.shape)


def tiny_slots(
    directory: Path, step: int = 1, generation: int = 1, layout: Layout | None = None
) -> dict[HostId, Path]:
    """Make the slot files that the hosts of a layout (the tiny one) have of a step."""
    layout = layout or tiny_layout()
    arrays = {array.path: array for array in layout.arrays}
    slots: dict[HostId, Path] = {}
    for host, shards in captures(layout).items():
        slots[host] = directory / f"{host}-{step}"
        data = [
            tiny_array(arrays[path], step)[relative_slices(box, full_box(arrays[path].shape))].tobytes()
            for path, box in shards
        ]
        static = make_static(host, layout, shards)
        write_slot(slots[host], static, data, step=step, generation=generation, position=8 * step)
    return slots


def write_tiny(root: Path, directory: Path, step: int = 1, generation: int = 1, epoch: int = 1) -> Path:
    facts = facts_of(tiny_layout(), step=step, generation=generation)
    staging = begin(root, step, generation, epoch=epoch)
    shares = persist_shares(facts.layout)
    for host, slot in tiny_slots(directory, step, generation).items():
        source = open_source([slot], step, (generation,))
        write_shards(staging, facts.layout, facts.tree, shares[host], source)
        source.close()
    return staging


def persist_tiny(
    root: Path,
    directory: Path,
    step: int = 1,
    generation: int = 1,
    restored_steps: Mapping[int, int] | None = None,
    epoch: int = 1,
) -> Persisted:
    root.mkdir(exist_ok=True)
    staging = write_tiny(root, directory, step, generation, epoch)
    facts = facts_of(tiny_layout(), step=step, generation=generation, epoch=epoch)
    return finish(root, staging, facts, restored_steps=restored_steps)
