"""Whether what was traced names devices: a constraint on a mesh in a script's function, or an array in it.

Such a program is right in its own world only. A function of a module that takes its mesh from a global
variable must be traced anew in each world, though to JAX its arguments look the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, Sharding


def names_devices(jaxpr: Any) -> bool:
    """Whether an equation of a (closed) jaxpr, or of one within it, has devices among its parameters, or a
    constant that is on devices.
    """
    closed, inner = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    if any(isinstance(const, jax.Array) for const in closed):
        return True
    return any(_has_devices(eqn.params.values()) for eqn in inner.eqns)


def _has_devices(values: Iterable[Any]) -> bool:
    return any(map(_is_on_devices, values))


def _is_on_devices(value: Any) -> bool:
    if isinstance(value, AbstractMesh):
        return False
    if isinstance(value, Mesh):
        return not value.empty
    if isinstance(value, Sharding):
        return not isinstance(getattr(value, "mesh", None), AbstractMesh)
    if isinstance(value, (tuple, list)):
        return _has_devices(value)
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return names_devices(value)
    return isinstance(value, jax.Device)
