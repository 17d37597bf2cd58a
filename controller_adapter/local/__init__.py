"""One process, virtual slices: the embedded default for laptops and notebooks. Does not import JAX.

The same state machine, arenas and planner as with real processes; the one training thread plays the part of
every slice's worker. Faults are simulated (`controller_adapter.local.faults`), and reports say so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastic.job import JobSpec
from elastic.ports import Link, Runtime
from reshard.errors import UsageError

if TYPE_CHECKING:
    from controller_adapter.local.launcher import LocalLauncher


class LocalAdapter:
    """See `elastic.ports.OneProcessAdapter`.

    Leaving a broken world in place is proven for simulated faults, the only ones there are: an error that a
    real device raises is the script's own, and ends the job with its message.
    """

    name = "local"
    in_place = "proven"
    simulated_faults = True
    one_process = True

    def service_command(self) -> tuple[str, ...]:
        """Nothing: there is no other process to meet."""
        return ()

    def worker_environment(self, spec: JobSpec) -> dict[str, str]:
        """Virtual CPU devices for all slices, and a compile cache to find an earlier world's programs in."""
        devices = spec.config.num_slices * spec.config.devices_per_host
        own_flags = os.environ.get("XLA_FLAGS", "")
        return {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{own_flags} --xla_force_host_platform_device_count={devices}".strip(),
            "JAX_COMPILATION_CACHE_DIR": os.environ.get(
                "JAX_COMPILATION_CACHE_DIR", str(spec.directory / "compile-cache")
            ),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    def connect(self, spec: JobSpec, slice_index: int) -> tuple[Link, Runtime]:
        """The engine of this process, and its devices. Ends what an earlier session here left behind.

        Raises UsageError when there are fewer devices than the slices need, or the job runs elsewhere.
        """
        from controller_adapter.local.connect import connect

        return connect(spec)

    def default_job(self, seed: int) -> JobSpec:
        """The job of a script without a launcher: slices out of the devices there are."""
        from controller_adapter.local.defaults import default_job

        return default_job(seed)

    def launcher(self, spec: JobSpec, faults: Sequence[Any]) -> LocalLauncher:
        """What runs the job's script as one process. Raises UsageError for what cannot be simulated."""
        if spec.config.hosts_per_slice > 1:
            raise UsageError(
                "the local adapter's virtual slices have one host each",
                remedy="Leave out --hosts-per-slice, or use --adapter multicontroller.",
            )
        from controller_adapter.local.faults import check_faults
        from controller_adapter.local.launcher import LocalLauncher

        check_faults(faults)
        return LocalLauncher(spec)


def adapter() -> LocalAdapter:
    """The entry point."""
    return LocalAdapter()
