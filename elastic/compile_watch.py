"""How long this process traces, lowers and compiles, and how often its persistent compile cache hits: JAX's
own events, counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.monitoring

_DURATIONS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_HIT = "/jax/compilation_cache/cache_hits"
_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What was compiled in a stretch of time. A program that is not found in the cache is a miss."""

    compile_s: float
    cache_hits: int
    cache_misses: int


class CompileWatch:
    """Sums up JAX's compile events; one for the process, since JAX's listeners cannot be taken away one by
    one.
    """

    _shared: CompileWatch | None = None

    def __init__(self) -> None:
        self._compile_s = 0.0
        self._hits = 0
        self._requests = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @classmethod
    def shared(cls) -> CompileWatch:
        """The process's watch, made at the first call."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    @property
    def compile_s(self) -> float:
        """The seconds spent in this stretch so far."""
        return self._compile_s

    def reset(self) -> None:
        """Begin a new stretch."""
        self._compile_s, self._hits, self._requests = 0.0, 0, 0

    def take(self) -> Compiled:
        """What was compiled since the last call."""
        compiled = Compiled(
            compile_s=self._compile_s,
            cache_hits=self._hits,
            cache_misses=max(self._requests - self._hits, 0),
        )
        self.reset()
        return compiled

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event in _DURATIONS:
            self._compile_s += duration_secs

    def _on_event(self, event: str, **_: object) -> None:
        self._hits += event == _HIT
        self._requests += event == _REQUEST
