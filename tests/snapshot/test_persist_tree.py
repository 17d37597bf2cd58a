"""The tree of a state, as Orbax must know it: described by the worker, or read off the paths."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from snapshot.describe import describe_tree
from snapshot.persist_tree import TreeKey, check_description, description_of
from snapshot.tree import flatten


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A custom node whose children have no names."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any, ...]) -> Unnamed:
        return cls(*children)


def test_kinds_of_keys_leaves_and_empty_nodes_are_described():
    state = {
        "pair": Pair(jnp.ones(2), None),
        "list": [np.zeros(1), (), [], {}],
        "custom": Unnamed(1, 2.0),
        "key": jax.random.key(0, impl="rbg"),
        "empty": optax.EmptyState(),
        3: True,
    }
    state = {str(key): value for key, value in state.items()}
    nodes = {node.name: (node.kind, node.key_impl) for node in describe_tree(state).nodes}
    assert nodes == {
        "3": ("scalar", None),
        "custom.0": ("scalar", None),
        "custom.1": ("scalar", None),
        "empty": ("None", None),
        "key": ("array", "rbg"),
        "list.0": ("array", None),
        "list.1": ("Tuple", None),
        "list.2": ("List", None),
        "list.3": ("Dict", None),
        "pair.left": ("array", None),
        "pair.right": ("None", None),
    }


trees = st.recursive(
    st.just(1.5),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.text(min_size=1, max_size=4), inner, min_size=1, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Unnamed, inner),
    ),
    max_leaves=8,
).filter(lambda tree: not isinstance(tree, float))


@given(tree=trees)
def test_paths_alone_tell_the_keys_of_a_tree_without_empty_nodes(tree: Any):
    described = describe_tree(tree).nodes
    read = description_of(flatten(tree).paths).nodes
    assert [(node.path, node.keys) for node in read] == [(node.path, node.keys) for node in described]


def test_a_node_with_keys_of_its_own_kind_is_refused():
    class Odd:
        pass

    jax.tree_util.register_pytree_with_keys(
        Odd, lambda node: ((("strange", 1.0),), None), lambda aux, children: Odd()
    )
    with pytest.raises(UsageError, match="names a child by a str, strange"):
        describe_tree(Odd())


def test_gaps_in_a_sequence_are_empty_nodes():
    nodes = description_of(["['a'][0]", "['a'][2]"]).nodes
    assert [(node.keys, node.kind) for node in nodes if node.is_empty] == [
        ((TreeKey("a", False), TreeKey("1", True)), "None")
    ]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "would both be stored as 'a.b'"),
        ({"a": 1, "a/b": 2}, "stored inside \"['a']\""),
        ({"..": 1}, "no name for a directory"),
        ({"a/../../b": 1}, "no name for a directory"),
        ({"/a": 1}, "no name for a directory"),
        ({"a\0": 1}, "no name for a directory"),
        ({"": 1}, "no name for a directory"),
        ({"_METADATA": 1}, "a name that Orbax uses itself"),
        ({"a" * 256: 1}, "more than 255 bytes"),
        (1.5, "no name for a directory"),
    ],
)
def test_trees_that_cannot_be_stored_are_refused(state: Any, message: str):
    tree = describe_tree(state)
    with pytest.raises(UsageError, match=re.escape(message)):
        check_description(tree, [leaf.path for leaf in tree.leaves])


def test_a_tree_that_is_not_the_layouts_is_refused():
    with pytest.raises(UsageError, match=r"differ: \['b'\]"):
        check_description(describe_tree({"a": 1}), ["['a']", "['b']"])


@pytest.mark.parametrize("path", ["a", "['a'", "[b]", "[-1]", "['a'];x"])
def test_what_is_no_path_is_refused(path: str):
    with pytest.raises(UsageError, match="not the path of a leaf"):
        description_of([path])
