"""Every private name of JAX that this project touches, here and in `jax_solo`: guarded by version.

`jax.distributed.initialize` is three things: a service, a client, and global state. Here they are apart, so
that the service lives in a process of its own and a client can be dropped and made again in a process that
lives on. Tried with JAX 0.10.2 on CPU.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import api, cache_key, compiler, core, distributed, pjit, util, xla_bridge
from jax.experimental import multihost_utils
from jaxlib import _jax

from controller_adapter.multicontroller.trace_watch import names_devices
from reshard.errors import UsageError

TRIED = ("0.10.1", "0.10.2")
NEVER_S = 10_000_000
"""Heartbeats of JAX's own service decide nothing: agents notice a loss much sooner, and a missed one would
abort the survivors.
"""

_MEETINGS = {
    name: getattr(multihost_utils, name)
    for name in ("assert_equal", "broadcast_one_to_all", "process_allgather", "sync_global_devices")
}
"""What waits for all processes of the runtime."""

_kept_traces = {
    "_cached_abstract_eval",
    "_cached_closed_call_dce_instantiate",
    "_cached_trace_to_jaxpr",
    "_broadcast_shapes_cached",
    "_dce_jaxpr",
    "_dce_jaxpr_pjit",
    "_fori_scan_body_fun",
    "_linearize_jaxpr",
    "_move_binders_to_front",
    "_partial_eval_jaxpr_nounits",
    "_prune_closed_jaxpr_outputs",
    "close_jaxpr",
    "convert_constvars_jaxpr",
    "current_jaxpr_eqn_context",
    "jaxpr_const_args",
    "jaxpr_has_prim_requiring_devices",
    "separate_consts",
    "trace_to_jaxpr",
}
"""Caches of JAX, by the functions they are of, that hold traced programs and nothing of devices: most of what
a first step costs when its program is in the persistent cache. Looked for with 0.10.2, one by one."""
_dropped_clients: list[weakref.ref[Any]] = []
"""The clients of the backends dropped last."""


def check_version() -> None:
    """Refuse a JAX whose private names are known to differ; warn about one that was not tried."""
    series = jax.__version__.split(".")[:2]
    if series != ["0", "10"]:
        raise UsageError(
            f"JAX {jax.__version__} was not tried with the multicontroller adapter",
            remedy=f"Install one of {', '.join(TRIED)}, or use the local adapter.",
        )
    if jax.__version__ not in TRIED:
        warnings.warn(f"JAX {jax.__version__} was not tried; {', '.join(TRIED)} were", stacklevel=2)


def start_service(address: str, num_processes: int) -> Any:
    """Start JAX's coordination service at `address` for so many processes."""
    return _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=NEVER_S, shutdown_timeout=1
    )


def is_backend_made() -> bool:
    """Whether something has used JAX's devices since they were last dropped."""
    return bool(xla_bridge.backends_are_initialized())


def connect(address: str, rank: int, num_processes: int, timeout_s: int) -> None:
    """Connect this process to the coordination service as `rank`. Raises JaxRuntimeError when it cannot."""
    state = distributed.global_state
    client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=timeout_s,
        shutdown_timeout=1,
        heartbeat_timeout=NEVER_S,
        shutdown_on_destruction=False,
        use_compression=False,
    )
    client.connect()
    state.client = client
    state.process_id = rank
    state.num_processes = num_processes
    state.coordinator_address = address


def bind_collectives(address: str) -> None:
    """Have this process's collectives (Gloo) listen on `address`, not where the host's name points to."""
    make = _jax.make_gloo_tcp_collectives

    def make_there(distributed_client: Any, **_: object) -> Any:
        return make(distributed_client=distributed_client, hostname=address)

    _jax.make_gloo_tcp_collectives = make_there


def put_and_collect(key: str, value: str, rank: int, num_processes: int, timeout_ms: int) -> list[str]:
    """Put this process's value under `key` and return all processes' values, in rank order."""
    client = distributed.global_state.client
    assert client is not None
    client.key_value_set(f"{key}/{rank}", value)
    return [client.blocking_key_value_get(f"{key}/{other}", timeout_ms) for other in range(num_processes)]


def guard_kept(lost: str) -> None:
    """From now on refuse, in words, what would wait for ever for processes of the runtime that are lost."""
    for name in _MEETINGS:
        setattr(multihost_utils, name, _refusing(f"jax.experimental.multihost_utils.{name}", lost))
    state = distributed.global_state
    if not isinstance(state.client, ClientWithoutBarriers):
        state.client = ClientWithoutBarriers(state.client, _refusing("a barrier of jax.distributed", lost))


def _refusing(name: str, lost: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UsageError(
            f"{name} would wait for ever: {lost} is lost, and this world goes on in its runtime",
            remedy="Use what the world offers, or start the job with --reconnect.",
        )

    return refuse


class ClientWithoutBarriers:
    """A client of the coordination service with something else in place of its barriers."""

    def __init__(self, client: Any, instead: Callable[..., Any]) -> None:
        self._client = client
        self.wait_at_barrier = instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def drop_backend() -> None:
    """Drop the backend, the client and every cache that refers to them; the process can connect again
    afterwards.

    Traced programs know shapes and no devices, so they stay for the next world; where one was traced that
    does name devices, all are dropped, then and from then on (`watch_traces`). Should one keep an older
    world's client alive all the same (a constant in it, say, that is an array), all are dropped from then on:
    of the world that is just left the script may still hold arrays, of the one before it no more.
    """
    of_older_worlds = list(_dropped_clients)
    _dropped_clients[:] = map(weakref.ref, xla_bridge._backends.values())
    api.effects_barrier()
    xla_bridge._clear_backends()
    _clear_caches()
    # Programs that one process compiled for all stay here for good, and with them their backend and its
    # client, which aborts this process when its service ends, some generations later.
    compiler._compile_and_share_module.modules_cache.clear()  # type: ignore[attr-defined]
    for name, meeting in _MEETINGS.items():
        setattr(multihost_utils, name, meeting)
    state = distributed.global_state
    state.client = None
    state.process_id = 0
    state.num_processes = 1
    gc.collect()
    if any(client() is not None for client in of_older_worlds):
        _kept_traces.clear()
        _clear_caches()
        gc.collect()


def _clear_caches() -> None:
    for cache, function in list(util._caches.items()):
        if _name_of(function) not in _kept_traces:
            cache.cache_clear()
    pjit._cpp_pjit_cache_fun_only.clear()
    pjit._cpp_pjit_cache_explicit_attributes.clear()
    _jax.PjitFunctionCache.clear_all()


def watch_traces() -> None:
    """Look through each program that is traced from now on, when it is called outside of any other."""
    infer_params: Any = pjit._infer_params

    def watched(*arguments: Any) -> Any:
        is_outermost = bool(_kept_traces) and core.trace_state_clean()
        params, values = infer_params(*arguments)
        if is_outermost and names_devices(params.params["jaxpr"]):
            _kept_traces.clear()
        return params, values

    setattr(pjit, "_infer_params", watched)  # noqa: B010 (its parameters are of no concern here)


def _name_of(function: str) -> str:
    """The name in `<function NAME at 0x…>`, which is how JAX names its caches."""
    words = function.split()
    return words[1] if words[0] == "<function" and len(words) > 1 else function


def share_compile_cache() -> None:
    """Let all processes of a world find each other's programs in the persistent compile cache.

    JAX puts a fingerprint of the topology into the key, which on CPU differs from process to process though
    the program is the same (seen with 0.10.2). Here it is replaced, on CPU, by the kinds of the devices and
    the features of the machine's processor. Which devices they are is left out too, as JAX does for GPUs: a
    program for two of three connected processes is that for two.
    """
    hash_config = cache_key._hash_accelerator_config
    features = _processor_features()

    def hash_on_cpu(hash_obj: Any, accelerators: np.ndarray[Any, Any]) -> None:
        if accelerators.flat[0].platform != "cpu":
            hash_config(hash_obj, accelerators)
            return
        hash_obj.update(features)
        for device in accelerators.flat:
            hash_obj.update(device.device_kind.encode())

    hash_options: Any = cache_key._hash_serialized_compile_options

    def hash_without_devices(
        hash_obj: Any, compile_options_obj: Any, strip_device_assignment: bool = False
    ) -> None:
        strip = strip_device_assignment or xla_bridge.get_backend().platform == "cpu"
        hash_options(hash_obj, compile_options_obj, strip_device_assignment=strip)

    cache_key._hash_accelerator_config = hash_on_cpu
    cache_key._hash_serialized_compile_options = hash_without_devices
    jax.config.update("jax_share_binary_between_hosts", True)  # one process compiles, the others take it over
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _processor_features() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return b""
    named = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(sorted(set(named))).encode()
