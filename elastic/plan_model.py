"""From a described model to its arrays: a transformer's dims, named arrays, and what the optimizer adds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - gives numpy the names of bfloat16 and its like
import numpy as np

from elastic.plan_file import Axes, ClusterTable, MeshTable, ModelTable, TransformerTable
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, Spec
from reshard.mesh import mesh_of_hosts

Dims = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel:
    """The arrays of a model; `gradient_paths` are the trained ones among them.

    `active_parameters` are the elements of those that one token passes through, None when that is not told.
    """

    arrays: tuple[ArrayLayout, ...]
    gradient_paths: frozenset[str]
    active_parameters: int | None


def describe_model(model: ModelTable) -> DescribedModel:
    """Return the arrays of `[model]`; raises `UsageError` for an unknown dtype or a model without arrays."""
    trained: list[ArrayLayout] = []
    others: list[ArrayLayout] = []
    itemsize = _itemsize(model.dtype, "model.dtype")
    if model.transformer is not None:
        rules: dict[str, tuple[str, ...]] = {name: _axes(axes) for name, axes in model.rules.items()}
        for path, dims in _transformer(model.transformer):
            trained.append(
                ArrayLayout(
                    path=f"params.{path}",
                    shape=tuple(dims.values()),
                    dtype=model.dtype,
                    itemsize=itemsize,
                    spec=tuple(rules.get(name, ()) for name in dims),
                )
            )
    for index, table in enumerate(model.arrays):
        dtype = model.dtype if table.dtype is None else table.dtype
        spec: Spec = tuple(_axes(axes) for axes in table.spec)
        for number in range(table.count):
            array = ArrayLayout(
                path=table.path if table.count == 1 else f"{table.path}.{number}",
                shape=table.shape,
                dtype=dtype,
                itemsize=_itemsize(dtype, f"model.arrays[{index}].dtype"),
                spec=spec,
            )
            (trained if table.trained else others).append(array)
    if not trained and not others:
        raise UsageError(
            "the model has no arrays", remedy="Give [model.transformer] or [[model.arrays]] in the plan."
        )
    arrays = [*trained, *_optimizer_arrays(model, trained), *others]
    return DescribedModel(
        arrays=tuple(arrays),
        gradient_paths=frozenset(array.path for array in trained),
        active_parameters=_active_parameters(model.transformer, trained),
    )


def lay_out(cluster: ClusterTable, mesh: MeshTable, chips_per_host: int, model: DescribedModel) -> Layout:
    """Return the layout of the model on the whole cluster.

    Devices are put in the order of slices, hosts and chips, the elastic axis outermost, as a recovery does.
    Raises `UsageError` when the axes do not multiply to the chips, or an array does not fit the mesh.
    """
    hosts = [HostId(s, h) for s in range(cluster.slices) for h in range(cluster.hosts_per_slice)]
    sizes = _axis_sizes(mesh, len(hosts) * chips_per_host)
    if mesh.elastic not in sizes:
        raise UsageError(f"mesh.elastic is {mesh.elastic!r}, which is not one of the axes {', '.join(sizes)}")
    return Layout(
        mesh=mesh_of_hosts(hosts, chips_per_host, sizes, outermost=mesh.elastic),
        arrays=model.arrays,
        elastic_axis=mesh.elastic,
    )


def _axis_sizes(mesh: MeshTable, num_devices: int) -> dict[str, int]:
    sizes = dict(mesh.axes)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UsageError(f"mesh.axes is {sizes}: sizes must be positive, and one of them may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        sizes[open_axes[0]] = num_devices // fixed
    if math.prod(sizes.values()) != num_devices:
        raise UsageError(
            f"axes multiply to {fixed}{' × -1' if open_axes else ''}, the cluster has {num_devices} chips",
            remedy="They must multiply to slices × hosts_per_slice × chips a host; one of them may be -1.",
        )
    return sizes


def _axes(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _itemsize(dtype: str, key: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError as error:
        raise UsageError(f"{key} is {dtype!r}, which is no dtype", key=key) from error


def _active_parameters(table: TransformerTable | None, trained: list[ArrayLayout]) -> int | None:
    num_parameters = sum(math.prod(array.shape) for array in trained)
    if table is None or not table.experts:
        return num_parameters
    if table.experts_per_token is None:
        return None
    num_in_experts = 3 * table.layers * table.experts * table.d_model * table.d_ff
    return num_parameters - num_in_experts * (table.experts - table.experts_per_token) // table.experts


def _optimizer_arrays(model: ModelTable, trained: list[ArrayLayout]) -> Iterator[ArrayLayout]:
    if model.optimizer == "none":
        return
    itemsize = _itemsize(model.optimizer_dtype, "model.optimizer_dtype")
    for moment in ("mu", "nu"):
        for array in trained:
            yield ArrayLayout(
                path=f"{moment}.{array.path.removeprefix('params.')}",
                shape=array.shape,
                dtype=model.optimizer_dtype,
                itemsize=itemsize,
                spec=array.spec,
            )


def _transformer(table: TransformerTable) -> Iterator[tuple[str, Dims]]:
    """Yield path and logical dims (in order) of each array; layers one by one, or stacked."""
    if (table.experts_per_token or 0) > table.experts:
        raise UsageError(
            f"model.transformer.experts_per_token is {table.experts_per_token}, of {table.experts} experts",
            remedy="Give experts, and experts_per_token up to it.",
            key="model.transformer.experts_per_token",
        )
    vocab, d_model = table.vocab, table.d_model
    yield "embed", {"vocab": vocab, "embed": d_model}
    for layer in ("layers",) if table.stacked else (f"layers.{i}" for i in range(table.layers)):
        for name, dims in _layer(table):
            yield f"{layer}.{name}", {"layers": table.layers, **dims} if table.stacked else dims
    yield "norm", {"norm": d_model}
    if not table.tied:
        yield "head", {"embed": d_model, "vocab": vocab}


def _layer(table: TransformerTable) -> Iterator[tuple[str, Dims]]:
    d_model, head_dim = table.d_model, table.head_dim or table.d_model // table.heads
    queries, keys = table.heads * head_dim, (table.kv_heads or table.heads) * head_dim
    yield "attention.norm", {"norm": d_model}
    yield "attention.q", {"embed": d_model, "heads": queries}
    yield "attention.k", {"embed": d_model, "kv": keys}
    yield "attention.v", {"embed": d_model, "kv": keys}
    yield "attention.o", {"heads": queries, "embed": d_model}
    yield "ff.norm", {"norm": d_model}
    experts = {"experts": table.experts} if table.experts else {}
    if experts:
        yield "ff.router", {"embed": d_model, "choices": table.experts}  # every slice chooses, so all have it
    yield "ff.gate", {**experts, "embed": d_model, "ff": table.d_ff}
    yield "ff.up", {**experts, "embed": d_model, "ff": table.d_ff}
    yield "ff.down", {**experts, "ff": table.d_ff, "embed": d_model}
