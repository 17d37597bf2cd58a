"""The records with which a coordinator begins."""

from __future__ import annotations

import os
import time

from elastic.job import JobSpec
from elastic.moves_resume import trains
from elastic.records import CoordinatorStarted, RunStarted
from elastic.saved_state import SavedState


def run_started(spec: JobSpec) -> RunStarted:
    """The first record of a run."""
    config = spec.config
    return RunStarted(
        unix_s=time.time(),
        run_id=spec.job_id,
        adapter=spec.adapter,
        in_place=spec.in_place,
        simulated_faults=spec.simulated_faults,
        slices=config.num_slices,
        spares=config.spares,
        min_slices=config.min_slices,
        devices_per_host=config.devices_per_host,
        replicas=config.replicas,
        seed=spec.seed,
        target_steps=spec.target_steps,
        command=spec.command,
        hosts_per_slice=config.hosts_per_slice,
    )


def started_record(epoch: int, taken_over: SavedState | None) -> CoordinatorStarted:
    """That this process commands from now on, and what it found."""
    return CoordinatorStarted(
        unix_s=time.time(),
        epoch=epoch,
        pid=os.getpid(),
        generation=0 if taken_over is None else taken_over.generation,
        phase="" if taken_over is None else taken_over.phase.value,
        goes_on=taken_over is not None and trains(taken_over),
    )
