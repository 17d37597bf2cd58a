"""Playing all processes of a runtime in one, to trace programs and not to run them. Tried with JAX 0.10.2.

PJRT's CPU clients exchange their devices through the key-value store of the coordination service, and that
is all they need of each other until a program runs. So one process makes such a client for each of the
others, lets go of it, and is left with one that has all devices.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, distributed, pjit
from jax._src.interpreters import pxla
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxlib import xla_client

from controller_adapter.multicontroller.jax_private import (
    ClientWithoutBarriers,
    connect,
    drop_backend,
    is_backend_made,
    start_service,
)
from reshard.errors import UsageError

_MEETINGS_ALONE: dict[str, Callable[..., Any]] = {
    "assert_equal": lambda *_, **__: None,
    "broadcast_one_to_all": lambda in_tree, *_, **__: in_tree,
    "sync_global_devices": lambda *_, **__: None,
}
"""What meetings of all processes are where one process plays all."""
_call, _run, _fast_path = (
    pjit._pjit_call_impl_python,
    pxla.ExecuteReplicated.__call__,
    pjit._get_fastpath_data,
)


@contextlib.contextmanager
def solo(num_processes: int, num_devices: int) -> Iterator[None]:
    """Within it this process is the first of so many with so many devices each, and the others do not exist.

    A program that spans processes is traced, but neither compiled nor run: its results are zeros. (One that
    the script compiles itself is compiled, and not run.) To meet the others is nothing. For CPU only.
    Afterwards the backend is dropped, and every array that was on it deleted. Raises RuntimeError.
    """
    with contextlib.ExitStack() as stack:  # undone in reverse: first of all, programs run again
        address = _free_address()
        stack.callback(start_service(address, 1).shutdown)
        connect(address, 0, 1, timeout_s=10)
        client: Any = distributed.global_state.client
        stack.callback(client.shutdown)
        distributed.global_state.num_processes = num_processes
        for process_id in range(1, num_processes):
            told = (client, process_id, num_processes, num_devices)
            peer = threading.Thread(target=_tell_devices, args=told, daemon=True)
            peer.start()
            stack.callback(peer.join)
        stack.callback(drop_backend)
        jax.devices()
        distributed.global_state.client = ClientWithoutBarriers(client, lambda *_, **__: None)
        stack.callback(_delete_arrays)
        stack.callback(_skip_programs, False)
        _skip_programs(True)
        yield


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def _delete_arrays() -> None:
    """The script may still hold some: of a whole state."""
    for array in jax.live_arrays() if is_backend_made() else ():
        array.delete()


def _tell_devices(client: Any, process_id: int, num_processes: int, num_devices: int) -> None:
    """What another process would put into the store: a client of its devices is made, and let go of."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first one fails too then, and says so
        xla_client.make_cpu_client(
            distributed_client=client,
            node_id=process_id,
            num_nodes=num_processes,
            num_devices=num_devices,
            get_local_topology_timeout_minutes=1,
            get_global_topology_timeout_minutes=1,
        )


def _skip_programs(is_solo: bool) -> None:
    pairs: tuple[tuple[Any, str, Any, Any], ...] = (
        (pjit, "_pjit_call_impl_python", _call, _call_or_skip),
        (pxla.ExecuteReplicated, "__call__", _run, _run_or_skip),
        (pjit, "_get_fastpath_data", _fast_path, lambda *_, **__: None),  # it would run them
    )
    for owner, name, usual, alone in pairs:
        setattr(owner, name, alone if is_solo else usual)
    if is_solo:
        for name, alone in _MEETINGS_ALONE.items():
            setattr(multihost_utils, name, alone)  # `drop_backend` puts back what was there


def _call_or_skip(*arguments: Any, **parameters: Any) -> Any:
    """In place of lowering, compiling and running a jitted program."""
    own = (getattr(each, "sharding", None) for each in arguments)
    found = [each for each in (*own, *parameters["out_shardings"]) if isinstance(each, Sharding)]
    spanning = [sharding for sharding in found if not sharding.is_fully_addressable]
    if not spanning:
        return _call(*arguments, **parameters)
    meshes = [sharding.mesh for sharding in spanning if isinstance(sharding, NamedSharding)]
    if not meshes:
        raise UsageError("a program without a mesh is not rehearsed")
    everywhere = NamedSharding(meshes[0], PartitionSpec())
    alike = {
        (each.shape, each.dtype): each.sharding for each in arguments if isinstance(each, jax.Array)
    }  # what goes in and comes out, such as the state, stays where it is
    outputs = [
        _zeros(
            aval,
            wanted if isinstance(wanted, NamedSharding) else alike.get((aval.shape, aval.dtype), everywhere),
        )
        for aval, wanted in zip(parameters["jaxpr"].out_avals, parameters["out_shardings"], strict=True)
    ]
    return outputs, None, None, []


def _run_or_skip(program: Any, *arguments: Any) -> Any:
    """In place of running a program that the script has compiled."""
    shardings: Sequence[Any] = (*program.in_handler.in_shardings, *program.out_handler.out_shardings)
    if all(sharding.is_fully_addressable for sharding in shardings):
        return _run(program, *arguments)
    return list(map(_zeros, program.out_handler.out_avals, program.out_handler.out_shardings))


def _zeros(aval: Any, sharding: Any) -> jax.Array:
    """An array of zeros of which this process has its shards."""
    shard = core.physical_aval(core.ShapedArray(sharding.shard_shape(aval.shape), aval.dtype))
    zeros = np.zeros(shard.shape, shard.dtype)
    shards = [jax.device_put(zeros, device) for device in sharding._addressable_device_assignment]
    made: jax.Array = pxla.global_aval_to_result_handler(aval, sharding, True)(shards)
    return made
