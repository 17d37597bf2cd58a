"""The form of a state's tree, and the names its arrays have on disk: those that Orbax gives them.

A layout lists arrays only. Orbax also wants to know each key's kind and where the tree has empty nodes (None,
`{}`, optax's EmptyState), or it refuses to restore into the user's tree. The worker describes its
state once (`snapshot.describe`); `description_of` is what the paths alone can tell.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from reshard.errors import UsageError

LeafKind = Literal["array", "scalar"]
EmptyKind = Literal["None", "Dict", "List", "Tuple"]

_RESERVED = frozenset(
    {"_METADATA", "_sharding", "array_metadatas", "commit_success.txt", "elastic.json", "manifest.ocdbt"}
)
_MAX_NAME_BYTES = 255
_TOKEN = re.compile(
    r"\.(?P<attribute>[^\W\d]\w*)"
    r"|\[(?P<index>\d+)\]"
    r"|\[<flat index (?P<flat>\d+)>\]"
    r"|\[(?P<key>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\]"
)


@dataclass(frozen=True, slots=True)
class TreeKey:
    """One level of a path: a dict key or attribute, or (`is_index`) a place in a sequence."""

    name: str
    is_index: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """A leaf or an empty node: its path as `jax.tree_util.keystr` writes it, and level by level.

    A scalar is one of Python's; an empty node's kind is what Orbax calls it; `key_impl` is that of a typed
    PRNG key.
    """

    path: str
    keys: tuple[TreeKey, ...]
    kind: LeafKind | EmptyKind
    key_impl: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether this is a node without leaves."""
        return self.kind not in ("array", "scalar")

    @property
    def name(self) -> str:
        """Orbax's name of it, and the directory of a leaf's array."""
        return ".".join(key.name for key in self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeDescription:
    """Every leaf and every empty node of a state's tree, in the tree's order."""

    nodes: tuple[TreeNode, ...]

    @property
    def leaves(self) -> tuple[TreeNode, ...]:
        """The nodes that hold an array."""
        return tuple(node for node in self.nodes if not node.is_empty)


def check_description(tree: TreeDescription, paths: Iterable[str]) -> dict[str, str]:
    """Return path → directory name of each array, after checking that Orbax can tell them apart.

    Raises UsageError, naming the paths, when the tree lacks one of `paths` or has others, when two arrays
    have one name (Orbax joins keys by dots: `['a.b']` and `['a']['b']`), or a name is none for a directory.
    """
    names = {leaf.path: leaf.name for leaf in tree.leaves}
    if sorted(names) != sorted(paths):
        odd = sorted(set(names) ^ set(paths)) or ["a path that is listed twice"]
        raise UsageError(f"the tree's leaves and the layout's arrays differ: {', '.join(odd[:5])}")
    owners: dict[str, str] = {}
    for path, name in names.items():
        _check_name(path, name)
        other = owners.setdefault(name, path)
        if other != path:
            raise _name_error(f"{other!r} and {path!r} would both be stored as {name!r}")
    for name, path in owners.items():
        for end in (index for index, letter in enumerate(name) if letter == "/"):
            if name[:end] in owners:
                raise _name_error(f"{path!r} would be stored inside {owners[name[:end]]!r}")
    return names


def description_of(paths: Iterable[str]) -> TreeDescription:
    """Return what the paths of a state's leaves tell of its tree: all but kinds and trailing empty nodes.

    A gap in a sequence is taken for an empty node, and a number for a place in a sequence, though it may be a
    dict's key. Raises UsageError for a path that `keystr` does not write, or that has other keys.
    """
    nodes = [TreeNode(path=path, keys=_parse(path), kind="array") for path in paths]
    indexes: defaultdict[tuple[TreeKey, ...], set[int]] = defaultdict(set)
    for node in nodes:
        for depth, key in enumerate(node.keys):
            if key.is_index:
                indexes[node.keys[:depth]].add(int(key.name))
    for parent, used in indexes.items():
        for index in sorted(set(range(max(used))) - used):
            keys = (*parent, TreeKey(str(index), True))
            nodes.append(
                TreeNode(path=f"(empty){'.'.join(key.name for key in keys)}", keys=keys, kind="None")
            )
    return TreeDescription(nodes=tuple(nodes))


def _parse(path: str) -> tuple[TreeKey, ...]:
    keys: list[TreeKey] = []
    end = 0
    while end < len(path):
        match = _TOKEN.match(path, end)
        if match is None:
            raise UsageError(f"{path!r} is not the path of a leaf, from {path[end:]!r} on", path=path)
        end = match.end()
        if match["attribute"] is not None:
            keys.append(TreeKey(match["attribute"], False))
        elif match["key"] is not None:
            keys.append(TreeKey(str(ast.literal_eval(match["key"])), False))
        else:
            keys.append(TreeKey(match["index"] or match["flat"], True))
    return tuple(keys)


def _check_name(path: str, name: str) -> None:
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise _name_error(f"{path!r} would be stored as {name!r}, which is no name for a directory")
    if any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
        raise _name_error(f"{path!r} would have a directory name of more than {_MAX_NAME_BYTES} bytes")
    if parts[0] in _RESERVED:
        raise _name_error(f"{path!r} would be stored as {name!r}, a name that Orbax uses itself")


def _name_error(message: str) -> UsageError:
    return UsageError(message, remedy="Rename a key of the state; Orbax cannot store this one either.")
