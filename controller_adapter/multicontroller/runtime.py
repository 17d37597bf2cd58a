"""The worker's runtime under multi-controller JAX: connect to a generation's service, make the devices,
drop them again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence

import jax

from controller_adapter.multicontroller import jax_private, jax_solo
from controller_adapter.multicontroller.gloo_sockets import GlooSockets, listening_ports
from elastic.agent_link import AgentLink
from elastic.events import WorldSpec
from elastic.job import JobSpec
from elastic.ports import Link, Runtime
from elastic.sessions import leave_on_sigterm
from reshard.errors import UsageError
from reshard.ids import HostId

CONNECT_TIMEOUT_S = 60


class MulticontrollerRuntime:
    """See `elastic.ports.Runtime`. Peers reach it at `bind_host`. `unblock` is for the link's thread, all
    else for the main thread.
    """

    def __init__(self, bind_host: str, num_devices: int = 1) -> None:
        jax_private.check_version()
        jax_private.bind_collectives(bind_host)
        jax_private.share_compile_cache()
        jax_private.watch_traces()
        gc.collect()
        # What is imported by now stays: the collection when a world is dropped looks only at the rest.
        gc.freeze()
        self._num_devices = num_devices
        """Of each process."""
        self._hosts: tuple[HostId, ...] = ()
        """The hosts whose processes are connected, in the order of their processes."""
        self._generation = 0
        """The generation in which they were connected (0: they are not)."""
        self.may_keep: Callable[[], bool] = lambda: False
        """Whether the next world may go on in the runtime of the one that is left."""
        self._gloo: GlooSockets | None = None
        self._solo = contextlib.ExitStack()
        self._is_solo = False
        """Whether this process plays all of a world."""

    def form(self, world: WorldSpec) -> Sequence[jax.Device]:
        """Connect as this world's rank and make its devices, in rank order; or, where the world goes on in a
        runtime that is connected, those of its slices in that.
        """
        if world.runtime_generation:
            return self._form_kept(world)
        self.release()
        if jax_private.is_backend_made():
            raise UsageError(
                "JAX was used outside `with world`: its devices exist before those of the world are made",
                remedy="Make keys, constants and other JAX arrays inside `with world`; numpy is free.",
            )
        num_processes = len(world.hosts)
        self._hosts = world.hosts
        if world.solo:
            return self._form_solo(num_processes)
        before = listening_ports()
        jax_private.connect(world.service_address, world.rank, num_processes, CONNECT_TIMEOUT_S)
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        own_ports = listening_ports() - before
        told = jax_private.put_and_collect(
            "elastic/gloo",
            ",".join(map(str, sorted(own_ports))),
            world.rank,
            num_processes,
            CONNECT_TIMEOUT_S * 1000,
        )
        ports = frozenset(int(port) for value in told for port in value.split(",") if port)
        self._gloo = GlooSockets(own_ports, ports - own_ports)
        self._generation = world.generation
        return devices

    def _form_solo(self, num_processes: int) -> Sequence[jax.Device]:
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        if platforms != "cpu":
            raise UsageError(f"a process can play all of a world on CPU only, not on {platforms}")
        self._solo.enter_context(jax_solo.solo(num_processes, self._num_devices))
        self._is_solo = True
        return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))

    def _form_kept(self, world: WorldSpec) -> Sequence[jax.Device]:
        if world.runtime_generation != self._generation:
            raise RuntimeError(
                f"this process is connected in generation {self._generation}, not {world.runtime_generation}"
            )
        left = set(world.hosts)
        lost = dict.fromkeys(host.slice_index for host in self._hosts if host not in left)
        jax_private.guard_kept(f"slice {', '.join(map(str, lost))}")
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        return [device for device in devices if self._hosts[int(device.process_index)] in left]

    def host_of(self, device: jax.Device) -> HostId:
        """The host whose process has this device."""
        return self._hosts[int(device.process_index)]

    def drop(self) -> None:
        """Drop the backend with everything on it; or keep it, where the next world may go on in it."""
        if not (self._generation and self.may_keep()):
            self._drop()

    def release(self) -> None:
        """Drop a backend that was kept."""
        if self._generation:
            self._drop()

    def _drop(self) -> None:
        self._gloo = None
        self._generation = 0
        if self._is_solo:
            self._is_solo = False
            self._solo.close()  # drops the backend
        else:
            jax_private.drop_backend()

    def unblock(self) -> None:
        """Shut down the Gloo connections of the current world."""
        gloo = self._gloo
        if gloo is not None:
            gloo.shut_down()


def connect(spec: JobSpec, member: int) -> tuple[Link, Runtime]:
    """The link to this host's agent, and the runtime that it can unblock."""
    runtime = MulticontrollerRuntime(spec.bind_host_of(member), spec.config.devices_per_host)
    link = AgentLink(spec, member, runtime.unblock)
    runtime.may_keep, link.release = link.keeps_runtime, runtime.release
    leave_on_sigterm(link.preempted)
    return link, runtime
