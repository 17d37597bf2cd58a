"""The job of a plain `python script.py`: nobody launched it, its slices are made of the devices there are."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import jax

from elastic.job import JobSpec, new_job_id, save_job
from elastic.state import Config
from reshard.errors import UsageError
from snapshot.gc import collect
from snapshot.job import DEFAULT_ROOT

ENV_SLICES = "ELASTIC_LOCAL_SLICES"
MAX_SLICES = 8


def default_job(seed: int) -> JobSpec:
    """Describe it, with a directory in `runs/`, or a temporary one where that cannot be.

    Memory of dead jobs is removed. `ELASTIC_LOCAL_SLICES` says how many slices to make; else see
    `choose_slices`. Raises UsageError when they do not divide the devices.
    """
    num_devices = len(jax.devices())
    num_slices = _wanted_slices(num_devices)
    collect(DEFAULT_ROOT)
    job_id = new_job_id()
    spec = JobSpec(
        job_id=job_id,
        directory=_directory(job_id),
        adapter="local",
        in_place="proven",
        simulated_faults=True,
        command=tuple(sys.argv),
        service_command=(),
        config=Config(
            num_slices=num_slices,
            devices_per_host=num_devices // num_slices,
            replicas=min(2, num_slices),
            rehearsals=0,
        ),
        seed=seed,
        shm_root=DEFAULT_ROOT,
    )
    save_job(spec)
    return spec


def choose_slices(num_devices: int) -> int:
    """The number of slices for so many devices: at most 8, of two devices or more where there are four.

    One where nothing else divides the devices.
    """
    most = min(MAX_SLICES, num_devices if num_devices < 4 else num_devices // 2)
    return next(count for count in range(most, 0, -1) if num_devices % count == 0)


def _wanted_slices(num_devices: int) -> int:
    value = os.environ.get(ENV_SLICES)
    if value is None:
        return choose_slices(num_devices)
    if not value.isdecimal() or int(value) < 1 or num_devices % int(value):
        raise UsageError(
            f"{ENV_SLICES}={value!r} does not divide the {num_devices} devices there are",
            remedy="Choose a divisor, or unset it.",
        )
    return int(value)


def _directory(job_id: str) -> Path:
    directory = Path("runs").absolute() / f"local-{job_id}"
    try:
        directory.mkdir(parents=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"elastic-local-{job_id}-"))
    return directory
