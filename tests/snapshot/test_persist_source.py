"""Reading from the persistent tier: any box, on any mesh, and nothing that is damaged."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax_helpers import as_bytes, captured, every_kind_of_leaf, hosts_of, make_mesh
from persist_helpers import facts_of, persist, persist_tiny, tiny_array, tiny_layout
from snapshot_helpers import flip

from reshard.boxes import full_box
from reshard.errors import CorruptCopyError, MissingShardError, UsageError
from snapshot.describe import describe_tree
from snapshot.persist_format import ITEM_NAME
from snapshot.persist_list import Persisted
from snapshot.persist_source import PersistentSource
from snapshot.restore import restore
from snapshot.tree import flatten, layout_of, target_of

W = "['w'].mu"


@pytest.fixture
def made(root: Path) -> Persisted:
    return persist_tiny(root / "run", root)


def test_every_kind_of_leaf_comes_back_bit_for_bit_on_another_mesh(root: Path):
    mesh = make_mesh()
    state = every_kind_of_leaf(mesh)
    layout = layout_of(state, mesh, hosts_of(mesh), elastic_axis="data")
    with captured(root, state, mesh) as arenas:
        made = persist(root / "run", arenas, facts_of(layout, describe_tree(state)))
    smaller = make_mesh(3)
    restored = restore(target_of(state, smaller), PersistentSource(made.path))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for path, before, after in zip(
        flatten(state).paths, flatten(state).leaves, flatten(restored).leaves, strict=True
    ):
        assert as_bytes(after) == as_bytes(before), path
        if isinstance(before, jax.Array) and isinstance(before.sharding, NamedSharding):
            assert after.sharding.mesh == smaller


def test_a_snapshot_of_format_version_1_stays_readable():
    """Made by `persist_helpers.persist_tiny`, step 1; never made anew."""
    source = PersistentSource(Path(__file__).parent / "data" / "persisted_v1" / "1")
    assert source.verify() == ()
    assert (source.step, source.generation, source.position) == (1, 1, 8)
    assert source.arrays == {array.path: array for array in tiny_layout().arrays}
    for path, array in source.arrays.items():
        assert source.read(path, full_box(array.shape)).tobytes() == tiny_array(array, 1).tobytes()


def test_boxes_go_into_the_buffers_they_are_asked_for(made: Persisted):
    source = PersistentSource(made.path)
    stage = bytearray(24)
    scalar = np.zeros((), np.uint32)
    raw = np.zeros(3, np.uint8)
    source.read_into(
        [
            (W, ((1, 3), (0, 3)), stage),
            ("['n']", (), scalar),
            ("['raw']", ((1, 4),), raw),
            ("['empty']", ((0, 0), (0, 3)), b""),
        ]
    )
    arrays = {array.path: tiny_array(array, 1) for array in tiny_layout().arrays}
    assert bytes(stage) == arrays[W][1:3].tobytes()
    assert scalar.tobytes() == arrays["['n']"].tobytes()
    assert raw.tobytes() == arrays["['raw']"][1:4].tobytes()
    assert source.read_piece(W, ((3, 4), (1, 2))).tobytes() == arrays[W][3:4, 1:2].tobytes()
    assert source.verify() == ()


@pytest.mark.parametrize("buffer", [bytes(24), bytearray(23), np.zeros((6, 2), np.float32).T])
def test_a_buffer_that_does_not_fit_is_refused(made: Persisted, buffer: object):
    with pytest.raises(UsageError, match="no writable memory of 24 bytes"):
        PersistentSource(made.path).read_into([(W, ((0, 2), (0, 3)), buffer)])


def test_every_flipped_byte_of_a_chunk_is_noticed_and_the_array_named(made: Persisted):
    chunk = made.path / ITEM_NAME / "w.mu" / "c" / "1" / "0"
    for offset in range(chunk.stat().st_size):
        flip(chunk, offset)
        source = PersistentSource(made.path)
        with pytest.raises(CorruptCopyError, match="Digest mismatch") as caught:
            source.read(W, ((3, 4), (0, 1)))
        assert (caught.value.path, caught.value.step) == (W, 1)
        assert source.read(W, ((0, 2), (0, 3))).shape == (2, 3)
        flip(chunk, offset)
    flip(chunk, 0)
    assert [copy.name for copy in PersistentSource(made.path).verify()] == [W]


def test_a_chunk_that_is_gone_is_missing_and_not_zeros(made: Persisted):
    (made.path / ITEM_NAME / "w.mu" / "c" / "0" / "0").unlink()
    with pytest.raises(MissingShardError) as caught:
        PersistentSource(made.path).read(W, full_box((4, 3)))
    assert (caught.value.path, caught.value.step) == (W, 1)


def test_a_truncated_chunk_and_bad_metadata_are_corrupt(made: Persisted):
    chunk = made.path / ITEM_NAME / "b.0" / "c" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    metadata = made.path / ITEM_NAME / "w.mu" / "zarr.json"
    metadata.write_text(metadata.read_text().replace("float32", "float64"))
    (made.path / ITEM_NAME / "raw" / "zarr.json").write_text("{")
    source = PersistentSource(made.path)
    for path, box in (("['b'][0]", ((0, 5),)), (W, ((0, 1), (0, 1))), ("['raw']", ((0, 1),))):
        with pytest.raises(CorruptCopyError) as caught:
            source.read(path, box)
        assert caught.value.path == path


def test_an_array_or_snapshot_that_is_not_there_is_said(made: Persisted, tmp_path: Path):
    with pytest.raises(MissingShardError, match="'x'"):
        PersistentSource(made.path).read("x", ())
    with pytest.raises(CorruptCopyError, match="not written by this project"):
        PersistentSource(tmp_path)
