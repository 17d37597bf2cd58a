"""Multi-controller JAX: one process a host, `jax.distributed`, here on CPU with Gloo. Importing this does
not import JAX.
"""

from __future__ import annotations

import os
import sys

from elastic.job import JobSpec
from elastic.ports import Link, Runtime

GLIBC_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x20000:glibc.malloc.hugetlb=1"
"""Copies of 128 KiB and more go past the cache: a snapshot takes a third less of the loop. Large arrays are
in huge pages, where the kernel has any: a restore does not pay for each page of 4 KiB, and a killed process,
whose memory is let go before anybody can see that it ended, is seen to have ended sooner.
"""


class MulticontrollerAdapter:
    """See `elastic.ports.Adapter`. Leaving a broken world in place is proven on CPU with Gloo only."""

    name = "multicontroller"
    in_place = "proven"
    simulated_faults = False
    one_process = False
    keeps_runtime = True
    plays_alone = True

    def service_command(self) -> tuple[str, ...]:
        """JAX's coordination service, in a process of its own."""
        return (sys.executable, "-m", "controller_adapter.multicontroller.jax_service")

    def worker_environment(self, spec: JobSpec) -> dict[str, str]:
        """CPU devices, and a compile cache that all workers share (the user's own, where one is set)."""
        devices = spec.config.devices_per_host
        own_flags = os.environ.get("XLA_FLAGS", "")
        return {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{own_flags} --xla_force_host_platform_device_count={devices}".strip(),
            "JAX_COMPILATION_CACHE_DIR": os.environ.get(
                "JAX_COMPILATION_CACHE_DIR", str(spec.directory / "compile-cache")
            ),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", GLIBC_TUNABLES),
        }

    def connect(self, spec: JobSpec, member: int) -> tuple[Link, Runtime]:
        """The link to this host's agent, and the runtime."""
        from controller_adapter.multicontroller.runtime import connect

        return connect(spec, member)


def adapter() -> MulticontrollerAdapter:
    """The entry point."""
    return MulticontrollerAdapter()
