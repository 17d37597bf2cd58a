"""From a described model to its arrays, and where they lie on the described cluster."""

from __future__ import annotations

import math

import pytest
from plan_files import EXAMPLES, changed

from elastic.plan_file import ModelTable, PlanFile, TransformerTable, parse_plan, read_plan_file
from elastic.plan_model import describe_model, lay_out
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout


def laid_out(plan: PlanFile, chips_per_host: int) -> Layout:
    return lay_out(plan.cluster, plan.mesh, chips_per_host, describe_model(plan.model))


def tiny(**fields: object) -> ModelTable:
    dims = {"layers": 2, "d_model": 8, "d_ff": 32, "heads": 4, "vocab": 16} | fields
    return ModelTable(transformer=TransformerTable(**dims))  # type: ignore[arg-type]


def test_llama_405b_has_the_parameters_its_authors_count() -> None:
    """405 B parameters in nine arrays a layer, embedding, output and a last norm; mu and nu beside them."""
    described = describe_model(read_plan_file(EXAMPLES / "llama_405b.toml").model)
    trained = [array for array in described.arrays if array.path in described.gradient_paths]
    assert len(trained) == 126 * 9 + 3
    assert len(described.arrays) == 3 * len(trained)
    assert round(sum(math.prod(array.shape) for array in trained) / 1e9, 1) == 405.9


def test_optimizer_adds_two_arrays_for_each_trained_one() -> None:
    model = ModelTable(
        dtype="bfloat16",
        arrays=parse_plan(
            changed(('path = "w"', 'path = "w"\ncount = 2\ndtype = "bfloat16"'))
            + '\n[[model.arrays]]\npath = "step"\nshape = []\ndtype = "int32"\ntrained = false\n'
        ).model.arrays,
    )
    described = describe_model(model)
    found = [(array.path, array.dtype, array.itemsize) for array in described.arrays]
    assert found == [
        ("w.0", "bfloat16", 2),
        ("w.1", "bfloat16", 2),
        ("mu.w.0", "float32", 4),
        ("mu.w.1", "float32", 4),
        ("nu.w.0", "float32", 4),
        ("nu.w.1", "float32", 4),
        ("step", "int32", 4),
    ]
    assert described.gradient_paths == {"w.0", "w.1"}


def test_rules_partition_the_dims_they_name() -> None:
    model = tiny(kv_heads=2)
    rules = {"embed": "fsdp", "heads": ("tensor", "data"), "vocab": ()}
    described = describe_model(ModelTable(transformer=model.transformer, rules=rules, optimizer="none"))
    specs = {array.path: (array.shape, array.spec) for array in described.arrays}
    assert specs["params.layers.0.attention.q"] == ((8, 8), (("fsdp",), ("tensor", "data")))
    assert specs["params.layers.1.attention.k"] == ((8, 4), (("fsdp",), ()))
    assert specs["params.embed"] == ((16, 8), ((), ("fsdp",)))
    assert specs["params.norm"] == ((8,), ((),))


def test_stacked_layers_are_one_array_of_all() -> None:
    one_by_one = describe_model(tiny(experts=4, tied=True)).arrays
    stacked = describe_model(tiny(experts=4, tied=True, stacked=True)).arrays
    assert sum(array.nbytes for array in stacked) == sum(array.nbytes for array in one_by_one)
    shapes = {array.path: array.shape for array in stacked}
    assert shapes["params.layers.ff.gate"] == (2, 4, 8, 32)
    assert shapes["params.layers.ff.router"] == (2, 8, 4)
    assert "params.head" not in shapes


@pytest.mark.parametrize("fields", [{"experts_per_token": 2}, {"experts": 4, "experts_per_token": 5}])
def test_more_experts_a_token_than_there_are_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="experts_per_token"):
        describe_model(tiny(**fields))


def test_hosts_lie_in_the_order_of_slices_with_the_elastic_axis_outermost() -> None:
    plan = parse_plan(changed(("{ data = -1, fsdp = 4 }", "{ fsdp = 4, data = -1 }")))
    layout = laid_out(plan, 2)
    assert layout.mesh.axis_sizes == (4, 4)
    assert layout.mesh.hosts[:4] == (HostId(0, 0), HostId(1, 0), HostId(2, 0), HostId(3, 0))
    assert layout.mesh == layout.resized(layout.mesh.distinct_hosts(), 2).mesh


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fsdp = 4 }", "fsdp = 3 }", "multiply to 3 × -1, the cluster has 16 chips"),
        ("data = -1", "data = 3", "multiply to 12, the cluster has 16 chips"),
        ("fsdp = 4 }", "fsdp = -1 }", "one of them may be -1"),
        ("fsdp = 4 }", "fsdp = 0 }", "must be positive"),
        ('elastic = "data"', 'elastic = "slice"', "not one of the axes data, fsdp"),
        ("shape = [16, 100]", "shape = [15, 100]", "dim 0 of 'w' has size 15"),
        ('spec = ["fsdp"]', 'spec = ["tensor"]', "no axis 'tensor'"),
        ('spec = ["fsdp"]', 'dtype = "float33"', r"model.arrays\[0\].dtype is 'float33'"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        laid_out(parse_plan(changed((old, new))), 2)


def test_model_without_arrays_is_refused() -> None:
    with pytest.raises(UsageError, match="no arrays"):
        describe_model(ModelTable())


def test_tokens_pass_through_some_of_the_experts() -> None:
    """Of three matrices of 8 × 32 in each of 4 experts and 2 layers, half are active."""
    all_of_them = describe_model(tiny(experts=4, experts_per_token=4)).active_parameters
    half = describe_model(tiny(experts=4, experts_per_token=2)).active_parameters
    assert all_of_them is not None
    assert half == all_of_them - 3 * 8 * 32 * 2 * 2
    assert describe_model(tiny(experts=4)).active_parameters is None
