"""Buffers in host memory that are used again and again: fresh memory costs far more than copying."""

from __future__ import annotations

import threading
from typing import cast

import numpy as np

from snapshot.slot import Bytes

# JAX makes arrays from numpy memory that is aligned to 64 bytes without copying it, even if told not to
# (`may_alias=False` is for jax.Arrays only, JAX 0.10). So buffers begin in the middle of such a line.
_LINE_BYTES = 64
_OFFSET_BYTES = 32


class Scratch:
    """Buffers that are used again; for any thread."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Return a buffer of `nbytes`, its content anything, that JAX cannot make an array of in place."""
        with self._lock:
            fitting = [raw for raw in self._free if len(raw) >= nbytes + _LINE_BYTES]
            raw = min(fitting, key=len, default=None)
            if raw is not None:
                self._free = [other for other in self._free if other is not raw]
            elif self._free:
                self._free.pop()  # too small: its room is better used for the new one
        if raw is None:
            raw = np.empty(nbytes + _LINE_BYTES, np.uint8)
        start = (_OFFSET_BYTES - raw.ctypes.data) % _LINE_BYTES
        return raw[start : start + nbytes]

    def give_back(self, buffer: Bytes) -> None:
        """Take back what `take` gave, from who is done with it."""
        with self._lock:
            self._free.append(cast("Bytes", buffer.base))
