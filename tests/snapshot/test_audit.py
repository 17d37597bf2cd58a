"""An audit sees every copy of every leaf on the devices, as a capture would store it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax_helpers import HOSTS, captured, device_checksums, every_kind_of_leaf, hosts_of, make_mesh

from reshard.copies import CopyIndex
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.audit import Auditor
from snapshot.tree import flatten, layout_of

MESH_DEVICES = 8


@pytest.fixture(scope="module")
def audited() -> tuple[Mesh, dict[str, Any], Layout, Auditor]:
    mesh = make_mesh()
    state = every_kind_of_leaf(mesh)
    layout = layout_of(state, mesh, hosts_of(mesh), elastic_axis="data")
    return mesh, state, layout, Auditor(layout, [device.id for device in mesh.devices.flat], HOSTS)


def with_bit_flipped(array: jax.Array, device_index: int) -> jax.Array:
    """The same array with another value in one device's copy, which JAX does not know of."""
    shards = []
    for place, shard in enumerate(array.addressable_shards):
        value = np.array(shard.data)
        if place == device_index:
            value.reshape(-1).view(np.uint8)[-1] ^= 0x40
        shards.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def test_audit_of_an_undisturbed_state_agrees_on_every_box(audited):
    _, state, layout, auditor = audited
    checksums = auditor.checksums(state)
    assert list(checksums) == list(HOSTS)
    index = CopyIndex.of_devices(layout)
    assert all(index.fits(host, packed) for host, packed in checksums.items())
    assert index.compare(checksums) == ()


def test_audit_has_the_checksums_that_a_capture_stores(audited, tmp_path: Path):
    mesh, state, layout, auditor = audited
    index = CopyIndex.of_devices(layout)
    on_devices = {
        shard: value
        for host, packed in auditor.checksums(state).items()
        for shard, value in zip(
            (index.shards[i] for i in index.ids[host]), np.frombuffer(packed, "<u8").tolist(), strict=True
        )
    }
    with captured(tmp_path, state, mesh) as arenas:
        stored = {
            (h.path, h.box): h.checksum for a in arenas for m in a.manifests().complete for h in m.holdings()
        }
    assert stored == on_devices


def test_audit_agrees_with_the_checksums_of_all_device_buffers(audited):
    mesh, state, layout, auditor = audited
    index = CopyIndex.of_devices(layout)
    known = {(path, device_id): value for (path, _, device_id), value in device_checksums(state).items()}
    ids = [device.id for device in mesh.devices.flat]
    num_seen = 0
    for host, packed in auditor.checksums(state).items():
        for place, value in enumerate(np.frombuffer(packed, "<u8").tolist()):
            path = index.shards[index.ids[host][place]][0]
            device_id = ids[index.positions[host][place]]
            if (path, device_id) in known:
                assert value == known[path, device_id]
                num_seen += 1
    assert num_seen >= 14 * MESH_DEVICES


@pytest.mark.parametrize("device_index", range(MESH_DEVICES))
@pytest.mark.parametrize("leaf", ["bfloat16", "float8", "nan", "scalar"])
def test_audit_names_leaf_slice_and_device_of_a_changed_copy(audited, leaf: str, device_index: int):
    _, state, layout, auditor = audited
    changed = {**state, leaf: with_bit_flipped(state[leaf], device_index)}
    (found,) = CopyIndex.of_devices(layout).compare(auditor.checksums(changed))
    assert found.path == f"['{leaf}']"
    assert found.suspects == (device_index // 2,)
    assert [(copy.host, copy.position) for copy in found.suspect_copies] == [
        (HostId(device_index // 2), device_index)
    ]


def test_audit_of_some_hosts_is_that_of_all_restricted_to_them(audited):
    mesh, state, layout, auditor = audited
    ids = [device.id for device in mesh.devices.flat]
    some = Auditor(layout, ids, [HostId(2), HostId(7)])
    assert some.checksums(state) == {HostId(2): auditor.checksums(state)[HostId(2)]}


def test_audit_does_not_keep_a_state_from_being_donated(audited):
    mesh, state, layout, _ = audited
    part = {"float32": jnp.copy(state["float32"]), "bfloat16": jnp.copy(state["bfloat16"])}
    layout = layout_of(part, mesh, hosts_of(mesh))
    Auditor(layout, [device.id for device in mesh.devices.flat], HOSTS).checksums(part)
    pointers = {k: v.addressable_data(0).unsafe_buffer_pointer() for k, v in part.items()}
    after = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(part)
    assert {k: v.addressable_data(0).unsafe_buffer_pointer() for k, v in after.items()} == pointers


def test_audit_refuses_a_state_of_another_structure(audited):
    _, state, _, auditor = audited
    with pytest.raises(UsageError, match=f"has {len(flatten(state).leaves) - 1} leaves"):
        auditor.checksums({name: leaf for name, leaf in state.items() if name != "int"})
