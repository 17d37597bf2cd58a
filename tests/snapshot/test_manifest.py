"""Static manifests are stored as bytes; manifests say which snapshots the job still stands on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_helpers import REPOSITORY, small_layout, small_static

import snapshot
from reshard.errors import CorruptCopyError, UsageError
from snapshot.manifest import (
    Manifest,
    decode_static,
    encode_static,
    is_on_lineage,
    make_static,
)

MANIFEST = Manifest(static=small_static(), step=60, generation=1, position=600, checksums=(1, 2, 2**64 - 1))


def test_static_manifest_comes_back_from_its_bytes() -> None:
    assert decode_static(encode_static(small_static())) == small_static()


@given(st.binary(max_size=300))
def test_any_other_bytes_are_a_corrupt_copy(data: bytes) -> None:
    with pytest.raises(CorruptCopyError, match="bad"):
        decode_static(data)


def test_shards_are_aligned_and_do_not_overlap() -> None:
    end = 0
    for entry in small_static().shards:
        assert entry.offset % 64 == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert small_static().data_bytes >= end


def test_shard_of_an_unknown_array_is_refused() -> None:
    with pytest.raises(UsageError, match="'nope'"):
        make_static(small_static().host, small_layout(), [("nope", ())])


def test_snapshot_newer_than_what_a_later_generation_restored_is_abandoned() -> None:
    assert is_on_lineage(MANIFEST, {1: 0, 2: 60})
    assert not is_on_lineage(MANIFEST, {1: 0, 2: 59})


def test_import_loads_neither_jax_nor_grpc_and_lists_few_names() -> None:
    code = "import sys, snapshot; print({'jax', 'grpc'} & {name.split('.')[0] for name in sys.modules})"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert shown.stdout.strip() == "set()"
    assert len(snapshot.__all__) <= 15
    assert all(hasattr(snapshot, name) for name in snapshot.__all__)
