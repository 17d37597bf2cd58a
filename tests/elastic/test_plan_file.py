"""Plan files: what is read, and errors that name the file, the line and the key."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from plan_files import EXAMPLES, SMALL, changed

import elastic
from elastic.plan_file import FigureName, parse_plan, read_plan_file
from reshard.accelerators import FIGURES
from reshard.errors import UsageError

TEMPLATE = Path(elastic.__file__).parent / "plan_template.toml"


@pytest.mark.parametrize("path", [*sorted(EXAMPLES.glob("*.toml")), TEMPLATE], ids=lambda path: path.stem)
def test_shipped_files_are_valid(path: Path) -> None:
    assert read_plan_file(path).title


def test_template_shows_every_key() -> None:
    """Also the keys that are commented out: with the mark taken away the file is still valid."""
    lines = [
        line.removeprefix("# ") if line.startswith("# ") and " = " in line.partition("# ")[2][:30] else line
        for line in TEMPLATE.read_text().splitlines()
    ]
    plan = parse_plan("\n".join(lines))
    for table in (plan, plan.cluster, plan.training, plan.snapshots, plan.recovery, plan.model.transformer):
        for name in table.__struct_fields__:
            assert any(name in line for line in lines), name
    assert plan.recovery.mtbf_s is not None
    assert plan.cluster.figures["host_copy_bytes_s"] > 0


def test_figures_that_can_be_given_are_those_of_the_table() -> None:
    assert get_args(FigureName) == FIGURES


def test_small_file_is_read() -> None:
    plan = parse_plan(SMALL)
    assert plan.mesh.axes == {"data": -1, "fsdp": 4}
    assert plan.model.arrays[0].spec == ("fsdp",)
    assert (plan.snapshots.replicas, plan.snapshots.slots, plan.recovery.min_slices) == (2, 2, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slices = 4", "slices = 0", "plan.toml, line 5: cluster.slices: Expected `int` >= 1"),
        ("slices = 4\n", "", "plan.toml, line 3: cluster.slices: Object missing required field `slices`"),
        ("step_s = 6.0", "step = 6.0", "plan.toml, line 30: training.step: .*unknown field `step`"),
        ('spec = ["fsdp"]', "spec = [3]", r"plan.toml, line 25: model.arrays\[0\].spec\[0\]: .*got `int`"),
        ("fsdp = 4", 'fsdp = "4"', r"plan.toml, line 16: mesh.axes\[...\]: Expected `int`, got `str`"),
        ('optimizer = "none"', 'optimizer = "sgd"', "plan.toml, line 20: model.optimizer: Invalid enum"),
        (
            "[[model.arrays]]",
            '[model.rules]\nembd = "fsdp"\n[[model.arrays]]',
            "plan.toml, line 23: model.rules.embd: Invalid enum value 'embd'",
        ),
        ("host_memory_bytes = 1e6", "host_memory_bytes = -1.0", "line 8: cluster.figures"),
        (
            "host_copy_bytes_s",
            "host_copy",
            "line 11: cluster.figures.host_copy: Invalid enum value 'host_copy'",
        ),
        ("[mesh]", "[mesh", r"plan.toml is not TOML: .*line 15"),
    ],
)
def test_mistake_is_named_with_its_line_and_key(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_plan(changed((old, new)), name="plan.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hosts_per_slice", "host_per_slice", "Known here are accelerator, slices, hosts_per_slice, "),
        ("[training]", "[trainig]", "Known here are title, cluster, mesh, model, training, "),
        ('path = "w"', 'path = "w"\ntrain = false', "Known here are path, shape, dtype, spec, "),
        ("host_copy_bytes_s", "host_copy", "Known here are chips_per_host, device_memory_bytes, "),
        ("[[model.arrays]]", '[model.rules]\nembd = "x"\n[[model.arrays]]', "Known here are embed, heads, "),
        ('optimizer = "none"', 'optimizer = "sgd"', "Known here are adam, none; "),
        ("[training]", '[recovery]\nlayouts = ["shrnk"]\n[training]', "Known here are shrink, replicate, "),
        ("slices = 4", "slices = 0", "Correct it; `elastic plan --template` shows every key"),
    ],
)
def test_mistake_is_answered_with_the_names_there_are(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_plan(changed((old, new)))
    assert message in str(error.value)


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("key", ["step_s", "state_factor"])
def test_numbers_that_are_not_finite_are_refused(key: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"training.{key}: Expected `float`"):
        parse_plan(changed(("step_s = 6.0", f"{key} = {value}")))


def test_second_array_of_several_is_named() -> None:
    text = SMALL + '\n[[model.arrays]]\npath = "b"\nshape = [1, "x"]\n'
    with pytest.raises(UsageError, match=r"line 34: model.arrays\[1\].shape\[1\]: Expected `int`, got `str`"):
        parse_plan(text)


def test_file_that_is_not_there_says_how_to_begin(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="elastic plan --template"):
        read_plan_file(tmp_path / "none.toml")


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not text in UTF-8"):
        read_plan_file(tmp_path / "plan.toml")
