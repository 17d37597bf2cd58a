"""Describing the tree of a state for the persistent tier; needs JAX, so the worker does it, once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from reshard.errors import UsageError
from snapshot.persist_tree import EmptyKind, LeafKind, TreeDescription, TreeKey, TreeNode
from snapshot.tree import is_prng_key, key_impl


def describe_tree(state: Any) -> TreeDescription:
    """Return every leaf and every empty node of a state (arrays or ShapeDtypeStructs).

    Keys are named as Orbax names them: a dict's by `str`, attributes by name, unnamed children by place.
    Raises UsageError for a node that names its children in another way.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_empty)
    return TreeDescription(nodes=tuple(_node(path, leaf) for path, leaf in found))


def _node(path: tuple[Any, ...], leaf: Any) -> TreeNode:
    return TreeNode(
        path=jax.tree_util.keystr(path),
        keys=tuple(_key(key) for key in path),
        kind=_empty_kind(leaf) if _is_empty(leaf) else _leaf_kind(leaf),
        key_impl=str(key_impl(leaf)) if is_prng_key(leaf) else None,
    )


def _key(key: Any) -> TreeKey:
    if isinstance(key, jax.tree_util.SequenceKey):
        return TreeKey(str(key.idx), True)
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        return TreeKey(str(key.key), True)
    if isinstance(key, jax.tree_util.DictKey):
        return TreeKey(str(key.key), False)
    if isinstance(key, jax.tree_util.GetAttrKey):
        return TreeKey(key.name, False)
    raise UsageError(
        f"a node of the state names a child by a {type(key).__name__}, {key}",
        remedy="Register it with DictKey, GetAttrKey or SequenceKey; Orbax knows no others either.",
    )


def _is_empty(node: Any) -> bool:
    structure: Any = jax.tree_util.tree_structure(node)
    return bool(structure.num_leaves == 0 and structure.num_nodes == 1)


def _empty_kind(node: Any) -> EmptyKind:
    if isinstance(node, tuple):
        return "None" if hasattr(node, "_fields") else "Tuple"
    if isinstance(node, list):
        return "List"
    return "Dict" if isinstance(node, dict) else "None"


def _leaf_kind(leaf: Any) -> LeafKind:
    return "array" if isinstance(leaf, np.ndarray) or hasattr(leaf, "sharding") else "scalar"
