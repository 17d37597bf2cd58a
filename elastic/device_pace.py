"""How fast this process's own devices are: a tiny program, timed now and then between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

SIDE = 64
PRODUCTS = 32
REPEATS = 3
"""The fastest of so many counts: a pause of the process is no slow device."""
SHARE = 1e-3
"""What it may take of the time, but for the slowest devices, which `MAX_PAUSE_S` keeps being timed."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 10.0
FIRST_AFTER_S = 10.0
"""How long after the beginning of a world: its program is compiled then, which no recovery waits for."""


class DevicePace:
    """Times a few small matrix products on each of `devices` at once, when it is their turn.

    Made at the beginning of a world.
    """

    def __init__(self, devices: Sequence[jax.Device], now: Callable[[], float] = time.perf_counter) -> None:
        self._devices = devices
        self._now = now
        self._due_s = now() + FIRST_AFTER_S
        self._program: Callable[[Any], Any] | None = None
        self._inputs: list[jax.Array] = []

    def measure_if_due(self) -> float | None:
        """Seconds for the program on the slowest device; None when it is not its turn yet."""
        if not self._devices or self._now() < self._due_s:
            return None
        if self._program is None:
            self._inputs = [
                jax.device_put(jnp.eye(SIDE, dtype=jnp.float32), device) for device in self._devices
            ]
            self._program = jax.jit(_products)
            jax.block_until_ready([self._program(one) for one in self._inputs])
        best_s = min(self._run(self._program) for _ in range(REPEATS))
        pause_s = min(max(REPEATS * best_s / SHARE, MIN_PAUSE_S), MAX_PAUSE_S)
        self._due_s = self._now() + pause_s
        return best_s

    def _run(self, program: Callable[[Any], Any]) -> float:
        began_s = self._now()
        jax.block_until_ready([program(one) for one in self._inputs])
        return self._now() - began_s


def _products(matrix: jax.Array) -> jax.Array:
    last: jax.Array = jax.lax.fori_loop(0, PRODUCTS, lambda _, product: jnp.tanh(product @ matrix), matrix)
    return last
