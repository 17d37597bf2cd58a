"""Whether a slice's own devices still work: a tiny program on each, with a bound."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

WITHIN_S = 15.0
"""A program of eight numbers takes milliseconds, and has to be compiled on a machine that may be busy."""


def own_devices(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """Those of `devices` that belong to this process."""
    return tuple(device for device in devices if device.process_index == device.client.process_index())


def probe_devices(
    devices: Sequence[jax.Device],
    within_s: float = WITHIN_S,
    run: Callable[[jax.Device], None] | None = None,
) -> str:
    """Run a tiny program on each device; "" when all give the right answer within `within_s`, else what is
    wrong.

    A device that does not answer keeps a thread of this process: end the process, do not leave its world.
    """
    run = run or _double
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    asked: list[jax.Device] = []

    def ask() -> None:
        try:
            for device in devices:
                asked.append(device)
                run(device)
        except Exception as error:
            answers.put(f"device {asked[-1]} failed: {type(error).__name__}: {error}"[:500])
            return
        answers.put("")

    threading.Thread(target=ask, name="device-probe", daemon=True).start()
    try:
        return answers.get(timeout=within_s)
    except queue.Empty:
        last = f"device {asked[-1]}" if asked else "the devices"
        return f"{last} did not answer within {within_s:g} s"


def _double(device: jax.Device) -> None:
    numbers = np.arange(8, dtype=np.float32)
    answer = np.asarray(jax.device_put(numbers, device) * 2)
    if not np.array_equal(answer, numbers * 2):
        raise ArithmeticError(f"{answer} is not twice {numbers}")
