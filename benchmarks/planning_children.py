"""What the benchmarks of planning share: options, children on one core, and JAX's index maps as a bound."""

from __future__ import annotations

import json
import os
import resource
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from machine import parser
from plan_model import Size, arrays


def options(description: str, default_json: str, reps_of: str) -> Namespace:
    """The command line's options; `reps_of` says what is done several times."""
    made = parser(description, default_json)
    made.add_argument("--reps", type=int, default=None, help=f"{reps_of} (default 5; smoke 1)")
    made.add_argument("--child", help="measure one size and print it (the benchmark's own use)")
    given = made.parse_args()
    given.reps = given.reps or (1 if given.smoke else 5)
    return given


def answer_child(request: str, measure: Callable[[dict[str, Any], Size], dict[str, float]]) -> None:
    """Print what `measure` finds for a request in this process, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asked = json.loads(request)
    print(json.dumps(measure(asked, Size(**asked["size"]))))


def peak_mb() -> float:
    """The most memory this process had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def jax_maps_s(size: Size) -> float:
    """Seconds for JAX's index maps of the distinct shapes over as many devices, nothing cached."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    class Device:
        platform, process_index, device_kind = "cpu", 0, "planned"

        def __init__(self, number: int) -> None:
            self.id = number

    jax.clear_caches()
    devices = np.array([Device(number) for number in range(size.num_chips)], dtype=object)
    mesh = Mesh(devices.reshape(size.num_slices, -1, 8), ("data", "fsdp", "tensor"))
    distinct = {(array.shape, array.spec) for array in arrays(size, over_slices=False)}
    began_s = time.perf_counter()
    for shape, spec in sorted(distinct):
        NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(shape)
    return time.perf_counter() - began_s
