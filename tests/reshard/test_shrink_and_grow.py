"""A state that lives only in host memory, through fifty losses and returns: each byte stays what it was.

No truth is kept beside it: each time the hosts capture what the plan before gave them, cut it into shards,
pull their buddy copies, and lose some of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.boxes import Box, relative_slices
from reshard.errors import MissingShardError
from reshard.execute import Execution, element_dtype, execute_transfers
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.planner import make_plan
from reshard.redundancy import buddies, captures

NUM_CHANGES = 50
NUM_SLICES = 6
DIVISIBLE = 60
"""Into any number of slices up to six."""
Shards = dict[tuple[str, Box], np.ndarray[Any, Any]]


class Cluster:
    """Hosts with numpy buffers for devices and dicts for snapshot memory."""

    def __init__(
        self, arrays: tuple[ArrayLayout, ...], *, hosts_per_slice: int, devices_per_host: int, replicas: int
    ) -> None:
        self.hosts_per_slice, self.devices_per_host = hosts_per_slice, devices_per_host
        self.replicas = replicas
        self.step = 0
        hosts = self.hosts_of(range(NUM_SLICES))
        mesh = MeshLayout(
            axis_names=("data", "model"),
            axis_sizes=(len(hosts), devices_per_host),
            hosts=tuple(host for host in hosts for _ in range(devices_per_host)),
        )
        self.layout = Layout(mesh=mesh, arrays=arrays, elastic_axis="data")
        rng = np.random.default_rng(0)
        self.values = {
            array.path: np.frombuffer(rng.bytes(array.nbytes), element_dtype(array.itemsize)).reshape(
                array.shape
            )
            for array in arrays
        }
        self.devices: dict[HostId, Shards] = {
            host: {
                (array.path, box): self.values[array.path][tuple(slice(*part) for part in box)].copy()
                for array in arrays
                for box in self.layout.boxes_by_host(array)[host]
            }
            for host in hosts
        }
        self.memory: dict[HostId, Shards] = {}

    def hosts_of(self, slices: Sequence[int]) -> list[HostId]:
        return [HostId(s, h) for s in sorted(slices) for h in range(self.hosts_per_slice)]

    @property
    def slices(self) -> set[int]:
        return {host.slice_index for host in self.devices}

    def capture(self) -> None:
        """Each host stores its share of what its devices have, then pulls what it keeps for others."""
        self.step += 1
        shares = captures(self.layout, self.replicas)
        captured = {
            host: {shard: self.devices[host][shard].copy() for shard in shards}
            for host, shards in shares.items()
        }
        copies = buddies(self.layout, self.replicas)
        self.memory = {
            host: captured[host]
            | {(copy.path, copy.box): captured[copy.sources[0]][copy.path, copy.box] for copy in copies[host]}
            for host in captured
        }

    def change(self, lost: set[int], left: set[int], joined: set[int]) -> None:
        """Slices are lost with their memory, leave and stay a source, and join empty-handed."""
        self.memory = {h: shards for h, shards in self.memory.items() if h.slice_index not in lost}
        hosts = self.hosts_of(sorted((self.slices - lost - left) | joined))
        holdings = [
            Holding(path=path, box=box, step=self.step, host=host, tier="shm", checksum=0)
            for host, shards in self.memory.items()
            for path, box in shards
        ]
        layout = self.layout.resized(hosts, self.devices_per_host)
        plan = make_plan(layout, holdings, step=self.step, min_cut_bytes=0)
        results = {
            host: execute_transfers(
                plan.for_target(host),
                layout,
                host,
                lambda transfer: self.memory[transfer.source][transfer.path, transfer.source_box],
                count_writes=True,
            )
            for host in hosts
        }
        self._check(results)
        assert sum(result.bytes_received for result in results.values()) == plan.bytes_lower_bound
        self.layout = layout
        self.devices = {host: dict(result.buffers) for host, result in results.items()}

    def _check(self, results: dict[HostId, Execution]) -> None:
        for result in results.values():
            for (path, box), buffer in result.buffers.items():
                whole = tuple((0, size) for size in self.values[path].shape)
                np.testing.assert_array_equal(buffer, self.values[path][relative_slices(box, whole)])
                assert (result.num_writes[path, box] == 1).all()


@st.composite
def states(draw: st.DrawFn) -> tuple[ArrayLayout, ...]:
    """Arrays that are split over slices, over the devices of one, over both, padded, or not at all."""
    arrays = []
    for index in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["slices", "inner", "both", "padded", "whole", "scalar"]))
        spec = {"slices": (("data",),), "inner": ((), ("model",)), "both": (("data", "model"), ())}.get(
            kind, ()
        )
        shape: tuple[int, ...] = (DIVISIBLE * 2, 4)
        if kind == "padded":
            shape, spec = (draw(st.integers(1, 20)), 3), (("data",), ())
        elif kind == "scalar":
            shape = ()
        arrays.append(
            ArrayLayout(
                path=f"{kind}{index}",
                shape=shape,
                dtype="opaque",
                itemsize=draw(st.sampled_from([1, 3, 4])),
                spec=spec,
                padded=kind == "padded",
            )
        )
    return tuple(arrays)


CHANGES = st.lists(
    st.tuples(*[st.sets(st.integers(0, NUM_SLICES - 1), max_size=2) for _ in range(3)]),
    min_size=NUM_CHANGES,
    max_size=NUM_CHANGES,
)


@settings(max_examples=settings().max_examples // 6, suppress_health_check=list(HealthCheck))
@given(
    states(),
    CHANGES,
    st.sampled_from([(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 2, 3)]),
)
def test_fifty_shrinks_and_grows_return_the_bytes_unchanged(
    arrays: tuple[ArrayLayout, ...], changes: list[tuple[set[int], set[int], set[int]]], shape: Any
) -> None:
    hosts_per_slice, devices_per_host, replicas = shape
    cluster = Cluster(
        arrays, hosts_per_slice=hosts_per_slice, devices_per_host=devices_per_host, replicas=replicas
    )
    for wished_lost, wished_left, wished_joined in changes:
        cluster.capture()
        # As many copies as slices are lost, and one: that is what `replicas` promises to survive.
        most = min(replicas, len(cluster.slices)) - 1
        lost = set(sorted(wished_lost & cluster.slices)[:most])
        left = set(sorted(wished_left & cluster.slices - lost)[: len(cluster.slices) - len(lost) - 1])
        cluster.change(lost, left, wished_joined - cluster.slices)


def test_the_loss_of_the_only_copy_of_a_part_is_refused_and_named() -> None:
    array = ArrayLayout(path="w", shape=(DIVISIBLE, 2), dtype="float32", itemsize=4, spec=(("data",), ()))
    cluster = Cluster((array,), hosts_per_slice=1, devices_per_host=1, replicas=1)
    cluster.capture()
    with pytest.raises(MissingShardError) as info:
        cluster.change({2}, set(), set())
    assert (info.value.path, info.value.box) == ("w", ((20, 30), (0, 2)))
