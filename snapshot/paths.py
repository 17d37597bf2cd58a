"""The names of arrays, as `jax.tree_util.keystr` writes them, taken apart without JAX."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

_PART = re.compile(
    r"""
    \[<flat\ index\ (?P<flat>\d+)>\]
    | \[(?P<key> '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | [^\[\]'"]*)\]
    | \.(?P<name>\w+)
    """,
    re.VERBOSE,
)


def split_path(path: str) -> tuple[Any, ...]:
    """Return keys, indexes and field names of a path: `['layers'][0].w` is `("layers", 0, "w")`.

    A path of another form is one part, and so is the empty path.
    """
    parts: list[Any] = []
    position = 0
    while position < len(path):
        match = _PART.match(path, position)
        if match is None:
            return (path,)
        position = match.end()
        parts.append(_value(match))
    return tuple(parts) or (path,)


def nest(values: Mapping[str, Any]) -> dict[Any, Any]:
    """Return values by path as nested dicts; one whose place another one takes stays under its whole path."""
    result: dict[Any, Any] = {}
    for path, value in values.items():
        *parents, last = split_path(path)
        node = result
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                node, last = result, path
                break
            node = child
        if last in node:
            node, last = result, path
        node[last] = value
    return result


def _value(match: re.Match[str]) -> Any:
    if match["flat"] is not None:
        return int(match["flat"])
    if match["name"] is not None:
        return match["name"]
    try:
        return ast.literal_eval(match["key"])
    except (ValueError, SyntaxError):
        return match["key"]
