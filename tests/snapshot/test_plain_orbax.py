"""Plain Orbax restores what agents wrote, on other meshes, in a process that cannot import this project."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from jax.sharding import Mesh
from jax_helpers import as_bytes, captured, every_kind_of_leaf, hosts_of, make_mesh, put
from persist_helpers import facts_of, persist, write_all
from snapshot_helpers import flip

from snapshot.describe import describe_tree
from snapshot.tree import flatten, layout_of


@jax.tree_util.register_dataclass
@dataclass
class Loop:
    count: jax.Array
    rate: float


def training_state(mesh: Mesh) -> dict[str, Any]:
    leaves = every_kind_of_leaf(mesh)
    params = {"w": leaves["float32"], "b.c/d": leaves["bfloat16"]}
    moments = jax.tree.map(lambda leaf: put(mesh, leaf + 1), optax.adam(0.1).init(params))
    nested = [leaves["scalar"], (leaves["bool"], None, ())]
    return leaves | {
        "params": params,
        "opt": moments,
        "list": nested,
        "nothing": {},
        "loop": Loop(leaves["single"], 0.5),
    }


def digests(state: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    flat = flatten(state)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        dtype, shape, data = as_bytes(leaf)
        found[path] = [dtype, list(shape), hashlib.sha256(data).hexdigest()]
    found["['uint2']"][0] = "uint8"
    return found


def without_containers(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Name leaves as they are in plain dicts and lists: without a target nothing knows of attributes."""
    return {re.sub(r"\.(\w+)(?=$|[\[.])", r"['\1']", path): content for path, content in found.items()}


@pytest.mark.timeout(120)
def test_plain_orbax_restores_every_kind_of_leaf_on_other_meshes(root: Path, tmp_path: Path):
    mesh = make_mesh()
    state = training_state(mesh)
    layout = layout_of(state, mesh, hosts_of(mesh), elastic_axis="data")
    tree = describe_tree(state)
    with captured(root, state, mesh) as arenas:
        persist(tmp_path / "run", arenas, facts_of(layout, tree))
    with captured(root, state, mesh, step=2) as arenas:
        write_all(tmp_path / "run", arenas, facts_of(layout, tree, step=2))  # in full, but not finished
    damaged = [str(tmp_path / "flipped"), str(tmp_path / "gone")]
    for copy in damaged:
        shutil.copytree(tmp_path / "run", copy)
    chunk = "1/default/params.w/c/1/1"
    flip(tmp_path / "flipped" / chunk, 5)
    (tmp_path / "gone" / chunk).unlink()
    script = str(Path(__file__).with_name("plain_orbax.py"))
    command = [sys.executable, "-I", script, str(tmp_path / "run"), "1", *damaged]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    restored = json.loads(result.stdout)
    expected = digests(state)
    for way in ("manager on 6", "manager on 1", "checkpointer", "v1"):
        assert restored.pop(way) == expected, way
    for way in ("manager without a target", "v1 without a target"):
        assert restored.pop(way) == without_containers(expected), way
    assert restored == dict.fromkeys(damaged, True)  # refused, and the array named
