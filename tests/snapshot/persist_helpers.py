"""Persisting what arenas hold, as agents do it, but in this process; and small jobs without JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.ids import HostId
from reshard.layout import Layout
from reshard.persist_shares import persist_shares
from snapshot.arena import Arena
from snapshot.contents import open_source
from snapshot.persist import Persisted, begin
from snapshot.persist_finish import finish
from snapshot.persist_format import PersistFacts
from snapshot.persist_store import write_shards
from snapshot.persist_tree import TreeDescription, description_of


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


def facts_of(
    layout: Layout, tree: TreeDescription | None = None, *, step: int = 1, generation: int = 1
) -> PersistFacts:
    tree = tree or description_of([array.path for array in layout.arrays])
    return PersistFacts(
        step=step, generation=generation, position=8 * step, layout=layout, tree=tree, extra={"seed": 7}
    )


def write_all(root: Path, arenas: list[Arena], facts: PersistFacts) -> Path:
    staging = begin(root, facts.step, facts.generation)
    shares = persist_shares(facts.layout, captured_by(arenas, facts.step))
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
