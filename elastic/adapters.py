"""Finding adapters and fault injectors by name, through entry points: `elastic` imports none of them."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from elastic.ports import Adapter
from reshard.errors import UsageError

ADAPTERS = "elastic.adapters"
INJECTORS = "elastic.injectors"


def find_adapter(name: str) -> Adapter:
    """The adapter of this name. Raises UsageError when none is installed."""
    adapter: Adapter = _load(ADAPTERS, name)
    return adapter


def find_injector() -> Any:
    """The fault injector that is installed. Raises UsageError when none is."""
    return _load(INJECTORS, "chaos")


def _load(group: str, name: str) -> Any:
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise UsageError(f"no {group} is called {name!r} (installed: {known})")
    return found[name].load()()
