"""Whatever a state is made of, its bytes come back equal, on any mesh that JAX allows for it."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_helpers import as_bytes, put

from reshard.ids import HostId
from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.restore import restore
from snapshot.tree import flatten, layout_of, target_of

FLOATS_8 = [
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (2, 4, 8, 16, 32, 64)]
FLOATS = ["float4_e2m1fn", *FLOATS_8, "float16", "bfloat16", "float32", "float64"]
DTYPES = ["bool", *INTEGERS, *FLOATS, "complex64", "complex128"]
KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def mesh_of(shape: tuple[int, int]) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("data", "model"))


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def every_pattern(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Values of any bits that the dtype has: NaNs of all kinds, infinities, negative zeros."""
    dtype, rng = dtype_of(name), np.random.default_rng(seed)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn"):
        bits = 2 if "2" in name[:5] else 4
        codes = rng.integers(0, 2**bits, shape, dtype=np.uint8)
        return codes.view(dtype) if name.startswith(("u", "f")) else codes.astype(np.int8).astype(dtype)
    return np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


@contextmanager
def one_arena(root: Path, state: Any, mesh: Mesh, num_threads: int | None = None) -> Iterator[Any]:
    """Capture `state` in one arena, all devices being of one host, and yield a source."""
    layout = layout_of(state, mesh, {device.id: HostId(0) for device in mesh.devices.flat})
    arena = Arena.create("job", HostId(0), root=root)
    try:
        capturer = Capturer(arena, layout, HostId(0), captures(layout, 1)[HostId(0)], num_threads=num_threads)
        arena.reserve(capturer.slot_bytes)
        capturer.capture(state, step=1, generation=1, position=0)
        source = arena.find_shards(1)
        yield source
        source.close()
    finally:
        arena.unlink()


def assert_same(restored: Any, expected: Any) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    flat = flatten(expected)
    for path, one, other in zip(flat.paths, flatten(restored).leaves, flat.leaves, strict=True):
        assert type(one) is type(other), path
        assert as_bytes(one) == as_bytes(other), path
        if isinstance(other, jax.Array):
            assert one.dtype == other.dtype, path


def round_trip(root: Path, state: Any, mesh: Mesh, other: Mesh) -> Any:
    with one_arena(root, state, mesh) as source:
        restored = restore(target_of(state, other), source)
    assert_same(restored, state)
    return restored


def test_every_dtype_comes_back_bit_for_bit(root: Path) -> None:
    with jax.enable_x64(True):
        mesh = mesh_of((4, 2))
        state = {
            name: [
                put(mesh, every_pattern(name, (12, 4)), "data", "model"),
                put(mesh, every_pattern(name, (4, 6), 1), None, "model"),  # on each slice, and partitioned
            ]
            for name in DTYPES
        }
        assert {str(leaves[0].dtype) for leaves in state.values()} == set(DTYPES)
        state["small"] = [put(mesh, every_pattern(name, ())) for name in ("int4", "bfloat16", "float64")]
        state["empty"] = [put(mesh, every_pattern(name, (0, 4)), None, "model") for name in ("int4", "bool")]
        round_trip(root, state, mesh, mesh_of((3, 2)))


def test_no_dtype_of_jax_is_left_out() -> None:
    scalars = {
        name: value
        for name, value in vars(jnp).items()
        if hasattr(value, "dtype") and isinstance(value, type(jnp.int8))
    }
    found = {str(value.dtype) for value in scalars.values()}
    # These have a name, but JAX 0.10 cannot compute with them on CPU devices.
    assert {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"} | set(DTYPES) >= found


@pytest.mark.parametrize("impl", KEY_IMPLS)
def test_keys_come_back_with_their_implementation(root: Path, impl: str) -> None:
    mesh = mesh_of((4, 2))
    keys = jax.random.split(jax.random.key(7, impl=impl), 12)
    state = {"one": jax.random.key(3, impl=impl), "many": put(mesh, keys, "data"), "raw": np.arange(3)}
    restored = round_trip(root, state, mesh, mesh_of((3, 2)))
    for name in ("one", "many"):
        assert jax.random.key_impl(restored[name]) == jax.random.key_impl(state[name])
    drawn = [jax.random.bits(tree["one"], (4,)).tolist() for tree in (state, restored)]
    assert drawn[0] == drawn[1]


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """A state as Flax writes it: a dataclass that is a pytree."""

    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: Any
    ema: Any


class Pair(NamedTuple):
    left: Any
    right: Any


def test_states_of_optax_and_dataclasses_keep_their_structure(root: Path) -> None:
    mesh = mesh_of((4, 2))
    params = {
        "kernel": put(mesh, every_pattern("float32", (12, 4)), "data", "model"),
        "bias": put(mesh, np.arange(4, dtype=np.float32), "model"),
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {"decayed": optax.adamw(1e-3), "plain": optax.sgd(optax.constant_schedule(0.1), momentum=0.9)},
            {"kernel": "decayed", "bias": "plain"},
        ),
    )
    state = TrainState(
        step=jnp.int32(7),
        params=params,
        opt_state=optimizer.init(params),
        ema=Pair(
            None,
            [Pair(params["bias"], ()), {"count": 3, "rate": 0.5, "on": False, "z": 1j, "np": np.int8(4)}],
        ),
    )
    restored = round_trip(root, state, mesh, mesh_of((2, 2)))
    assert type(restored.opt_state) is type(state.opt_state)
    assert isinstance(restored.opt_state[0], optax.EmptyState)
    gradients = jax.tree.map(jnp.ones_like, restored.params)
    updates, _ = jax.jit(optimizer.update)(gradients, restored.opt_state, restored.params)
    assert updates["kernel"].shape == (12, 4)


def test_uneven_layouts_are_whole_where_jax_allows_them(root: Path) -> None:
    mesh = mesh_of((4, 2))
    whole = every_pattern("float32", (7, 6))
    with pytest.raises(ValueError, match="evenly divide"):
        put(mesh, whole, "data")
    state = {"rows": put(mesh, whole, None, "model"), "all": put(mesh, whole)}
    restored = round_trip(root, state, mesh, mesh_of((2, 3)))
    assert restored["rows"].addressable_shards[0].data.shape == (7, 2)
    with one_arena(root, state, mesh) as source:
        uneven = NamedSharding(mesh_of((2, 2)), PartitionSpec("data"))
        with pytest.raises(ValueError, match="evenly divide"):
            restore({"rows": jax.ShapeDtypeStruct((7, 6), np.float32, sharding=uneven)}, source)


MESHES = st.sampled_from([(4, 2), (2, 4), (8, 1), (3, 2), (2, 3), (1, 2), (2, 2), (1, 1)])
AXES: list[tuple[str, ...]] = [(), ("data",), ("model",), ("data", "model"), ("model", "data")]


@dataclass(frozen=True)
class Drawn:
    """An array of a drawn state; specs that do not divide on a mesh become replication there."""

    dtype: str
    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    seed: int

    def spec_on(self, mesh: Mesh) -> PartitionSpec:
        fitting = [
            axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()
            for size, axes in zip(self.shape, self.spec, strict=True)
        ]
        return PartitionSpec(*[axes or None for axes in fitting])


@st.composite
def drawn_arrays(draw: st.DrawFn) -> Drawn:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 8, 12, 24]), max_size=3)))
    free, spec = set(AXES[3]), []
    for _ in shape:
        axes = draw(st.sampled_from([axes for axes in AXES if set(axes) <= free]))
        free -= set(axes)
        spec.append(axes)
    dtypes = st.sampled_from([name for name in DTYPES if not name.endswith(("64", "128"))])
    return Drawn(draw(dtypes), shape, tuple(spec), draw(st.integers(0, 9)))


TREES = st.recursive(
    st.one_of(drawn_arrays(), st.none(), st.integers(-(2**40), 2**40), st.booleans(), st.floats(width=32)),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.builds(Pair, children, children),
        st.dictionaries(st.sampled_from(["a", "b/c", "['d']", ""]), children, max_size=3),
    ),
    max_leaves=8,
)


@given(tree=TREES, first=MESHES, second=MESHES, num_threads=st.sampled_from([1, 3]))
def test_any_state_on_any_mesh_comes_back_bit_for_bit_on_any_other(
    tree: Any, first: tuple[int, int], second: tuple[int, int], num_threads: int
) -> None:
    def is_drawn(leaf: Any) -> bool:
        return isinstance(leaf, Drawn)

    def made(leaf: Any, mesh: Mesh, make: Any) -> Any:
        return make(leaf, NamedSharding(mesh, leaf.spec_on(mesh))) if is_drawn(leaf) else leaf

    def array(leaf: Drawn, sharding: NamedSharding) -> Any:
        return jax.device_put(every_pattern(leaf.dtype, leaf.shape, leaf.seed), sharding)

    def struct(leaf: Drawn, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype), sharding=sharding)

    state = jax.tree.map(lambda leaf: made(leaf, mesh_of(first), array), tree, is_leaf=is_drawn)
    target = jax.tree.map(lambda leaf: made(leaf, mesh_of(second), struct), tree, is_leaf=is_drawn)
    root = Path(tempfile.mkdtemp(prefix="elastic-slices-test-", dir="/dev/shm"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("snapshot.copying.MIN_BYTES_A_THREAD", 1)
            with one_arena(root, state, mesh_of(first), num_threads) as source:
                restored = restore(target, source, num_threads=num_threads)
        assert_same(restored, state)
        for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
            if isinstance(leaf, jax.Array):
                assert leaf.sharding == wanted.sharding
    finally:
        shutil.rmtree(root)
