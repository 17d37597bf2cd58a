"""How arrays are cut into chunks and stored, and the facts beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_helpers import facts_of, tiny_layout

from reshard.boxes import Box, full_box, is_covered, volume
from reshard.errors import CorruptCopyError, UsageError
from reshard.execute import element_dtype
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from snapshot.persist import begin
from snapshot.persist_finish import finish
from snapshot.persist_format import (
    PersistFacts,
    chunk_shape,
    decode_facts,
    encode_facts,
    stored_array,
)
from snapshot.persist_source import PersistentSource
from snapshot.persist_store import write_shards

NARROW = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
FLOAT8 = ("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e8m0fnu")
NAMES = (*NARROW, *FLOAT8, "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2")
PLAIN = (
    "bool",
    "int8",
    "uint16",
    "int32",
    "uint64",
    "bfloat16",
    "float16",
    "float64",
    "complex64",
    "complex128",
)
FACTS = facts_of(tiny_layout(), step=3)


class Memory:
    """A source that has one array."""

    def __init__(self, elements: np.ndarray[Any, Any]) -> None:
        self.elements = elements

    def read(self, path: str, box: Box) -> np.ndarray[Any, Any]:
        return self.elements


@pytest.mark.parametrize("name", [*NAMES, *PLAIN, "datetime64[ns]", "S3", ">f4"])
def test_each_dtype_is_stored_byte_for_byte(root: Path, name: str):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = ArrayLayout(path="['x']", shape=(6,), dtype=str(dtype), itemsize=dtype.itemsize)
    layout = Layout(mesh=MeshLayout(axis_names=(), axis_sizes=(), hosts=(HostId(0),)), arrays=(array,))
    values = np.random.default_rng(0).integers(0, 2 if name in NARROW else 256, 6 * dtype.itemsize, np.uint8)
    if name == "bool":
        values %= 2
    facts = facts_of(layout)
    staging = begin(root, 1, 1)
    source = Memory(values.view(element_dtype(dtype.itemsize)))
    write_shards(staging, layout, facts.tree, [("['x']", ((0, 6),))], source)
    made = finish(root, staging, facts)
    assert PersistentSource(made.path).read("['x']", ((0, 6),)).tobytes() == values.tobytes()


dims = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3)), max_size=2)


@given(dims=dims, itemsize=st.sampled_from([1, 2, 8]), max_bytes=st.integers(8, 100))
def test_chunks_cover_the_array_once_and_never_cross_a_box(
    dims: list[tuple[int, int]], itemsize: int, max_bytes: int
):
    box_shape = tuple(length for length, _ in dims)
    shape = tuple(length * parts for length, parts in dims)
    chunk = chunk_shape(shape, box_shape, itemsize, max_bytes)
    for (length, parts), part in zip(dims, chunk, strict=True):
        assert 1 <= part <= max(length, 1)
        assert parts == 1 or length % part == 0
    array = ArrayLayout(path="x", shape=shape, dtype=f"uint{8 * itemsize}", itemsize=itemsize)
    layout = Layout(mesh=MeshLayout(axis_names=(), axis_sizes=(), hosts=(HostId(0),)), arrays=(array,))
    form = replace(stored_array(layout, array), chunk_shape=chunk)
    boxes = [box for _, box in form.chunks()]
    assert sum(volume(box) for box in boxes) == volume(full_box(shape))
    assert is_covered(full_box(shape), boxes)


@pytest.mark.parametrize(
    ("shape", "box_shape", "expected"),
    [
        ((1024, 1024), (1024, 1024), (16, 1024)),
        ((1021, 1024), (1021, 1024), (16, 1024)),  # a prime number of rows: the last chunk is shorter
        ((2042, 1024), (1021, 1024), (1021, 16)),  # the same, sharded: the next dim is cut
        ((2, 1 << 20), (1, 1 << 20), (1, 1 << 14)),
        ((8, 8), (4, 4), (4, 4)),
    ],
)
def test_chunks_are_about_as_large_as_asked(
    shape: tuple[int, ...], box_shape: tuple[int, ...], expected: tuple[int, ...]
):
    assert chunk_shape(shape, box_shape, 4, 64 << 10) == expected


def test_facts_come_back_and_every_changed_byte_is_noticed():
    data = encode_facts(FACTS)
    assert decode_facts(data) == FACTS
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 1
        with pytest.raises(CorruptCopyError):
            decode_facts(bytes(changed))


def test_facts_of_a_later_version_are_refused_by_name():
    later = replace(FACTS, format_version=2)
    with pytest.raises(CorruptCopyError, match="format version 2, this release reads 1"):
        decode_facts(encode_facts(later))


def test_facts_that_are_not_json_are_refused():
    with pytest.raises(UsageError, match="not JSON"):
        encode_facts(PersistFacts(**{**_fields(FACTS), "extra": {"x": object()}}))


def _fields(facts: PersistFacts) -> dict[str, object]:
    return {name: getattr(facts, name) for name in facts.__dataclass_fields__}
