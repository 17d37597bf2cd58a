"""A view shows exactly what a capture of real JAX arrays stored, for every kind of leaf."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jax_helpers import as_bytes, captured, every_kind_of_leaf, make_mesh

import snapshot


def test_view_equals_the_captured_state_for_every_dtype_and_layout(root: Path) -> None:
    mesh = make_mesh()
    state = every_kind_of_leaf(mesh)
    with captured(root, state, mesh), snapshot.open("job", root=root) as view:
        leaves = jax.tree_util.tree_flatten_with_path(state)[0]
        assert len(view) == len(leaves)
        copies = view.copies()
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path)
            for shown in (view[name], copies[name], view.tree()[path[0].key]):
                assert as_bytes(np.asarray(shown)) == as_bytes(leaf), name
            for shard in view.shards(name):
                index = tuple(slice(*part) for part in shard.box)
                assert shard.elements.tobytes() == copies[name][index].tobytes()
        assert view.is_current()
