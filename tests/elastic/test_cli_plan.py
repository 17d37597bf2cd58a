"""`elastic plan` on the command line: its text, its JSON, its exit status, and the examples that ship."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from plan_files import EXAMPLES, REPOSITORY, SMALL, changed

from elastic.cli import cli
from elastic.plan_report import Outcome
from elastic.plan_text import group_alike, name_cases
from reshard.accelerators import ACCELERATORS, FIGURES
from reshard.errors import UsageError

PAGE = REPOSITORY / "docs" / "planning.md"


def run(*args: object, status: int = 0) -> str:
    """Run `elastic plan` in this process and return what it prints."""
    result = CliRunner().invoke(cli, ["plan", *map(str, args)], standalone_mode=False)
    assert result.exception is None, result.exception
    assert (result.return_value or 0) == status
    return result.output


def answer(*args: object, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json", status=status))
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(SMALL)
    return path


def test_losing_any_slice_is_told_in_one_column(small: Path) -> None:
    text = run(small)
    assert "losing any of slices 0–3" in text
    assert "return of slice 0" in text
    assert "data=3 on 3 slices (shrink): chosen" in text
    assert "Goodput: give recovery.mtbf_s and recovery.repair_s" in text


def test_losses_that_are_asked_for_are_told_by_name(small: Path) -> None:
    assert "losing slices 1 and 3 at once" in run(small, "--lose", "3,1")
    assert "losing slice 0" in run(small, "--lose", "0")


def test_json_has_the_numbers_and_their_sources(small: Path) -> None:
    found = answer(small, "--lose", "2")
    assert found["schema"] == 1
    assert found["described"]["mesh"] == {"data": 4, "fsdp": 4}
    assert found["described"]["sources"]["host_network_bytes_s"] == "the plan file"
    loss, back = found["outcomes"]
    assert (loss["event"], loss["slices"], loss["verdict"]) == ("loss", [2], "goes on")
    assert loss["move"]["bytes_moved"] == loss["move"]["bytes_lower_bound"]
    assert loss["candidates"][0]["kind"] == "shrink"
    assert (back["event"], back["slices"]) == ("return", [2])


def test_state_that_goes_with_its_slice_ends_with_status_1() -> None:
    text = run(EXAMPLES / "refused.toml", status=1)
    assert "Losing any of slices 0–3: state is gone" in " ".join(text.split())
    assert "'moments.0', box [0:2048, 0:512]" in " ".join(text.split())
    found = answer(EXAMPLES / "refused.toml", status=1)
    assert found["outcomes"][0]["missing"]["path"] == "moments.0"
    assert found["outcomes"][0]["missing"]["box"] == [[0, 2048], [0, 512]]


def test_two_copies_are_the_way_out_of_the_refusal(tmp_path: Path) -> None:
    text = (EXAMPLES / "refused.toml").read_text()
    (tmp_path / "plan.toml").write_text(text.replace("replicas = 1", "replicas = 2"))
    assert "losing any of slices 0–3" in run(tmp_path / "plan.toml")


def test_pipeline_stages_over_slices_have_an_answer_on_three() -> None:
    loss = answer(EXAMPLES / "stages_over_slices.toml", "--lose", "1")["outcomes"][0]
    assert loss["verdict"] == "goes on"
    assert "does not divide into 3" in loss["explanation"]


def test_405b_on_32_slices_goes_on_with_31() -> None:
    found = answer(EXAMPLES / "llama_405b.toml", "--lose", "3")
    assert found["described"]["devices"] == 8192
    assert found["described"]["arrays"] == 3411
    loss, back = found["outcomes"]
    assert [loss["verdict"], back["verdict"]] == ["goes on", "goes on"]
    assert loss["candidates"][0]["axis_size"] == 31
    # Two copies over 32 slices: a host captures a sixteenth of the state that its four chips need.
    host, device = found["host_memory"], found["device_memory"]
    assert host["captured_bytes"] * 16 == pytest.approx(device["state_bytes"] * 4, rel=0.01)
    assert host["fits"]
    for outcome in (loss, back):
        assert outcome["move"]["bytes_moved"] == outcome["move"]["bytes_lower_bound"] > 0


def test_experts_over_slices_have_an_answer_on_seven() -> None:
    found = answer(EXAMPLES / "moe_experts_over_slices.toml")
    assert found["host_memory"]["copies_bytes"] > 0
    kinds = {candidate["kind"]: candidate["refused"] for candidate in found["outcomes"][0]["candidates"]}
    assert "does not divide into 7" in kinds["shrink"]
    assert "" in kinds.values()


def test_template_is_a_plan_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(run("--template"))
    assert "losing any of slices 0–3" in run(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "elastic plan needs a FILE. `elastic plan --template"),
        (("none.toml",), "cannot read none.toml"),
        (("small", "--lose", "9"), "slices 0 to 3, not 9"),
    ],
)
def test_wrong_input_is_answered_with_what_to_do(small: Path, args: tuple[str, ...], message: str) -> None:
    words = [str(small) if word == "small" else word for word in args]
    result = CliRunner().invoke(cli, ["plan", *words], standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)
    assert result.exception.exit_status == 2


def test_parts_that_do_not_fit_together_are_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(changed(("fsdp = 4", "fsdp = 3")))
    result = CliRunner().invoke(cli, ["plan", str(path)], standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith(
        f"{path}: axes multiply to 3 × -1, the cluster has 16 chips. They must"
    )


def test_step_bound_by_its_exchange_is_compared_by_time(tmp_path: Path) -> None:
    """A batch that takes next to no compute: gradients of 6,400 bytes over 4 slices, afterwards over 3."""
    path = tmp_path / "plan.toml"
    path.write_text(
        changed(
            ("step_s = 6.0", "tokens_per_row = 1"),
            ("[cluster.figures]", "[cluster.figures]\npeak_flops_s = 1e12"),
        )
    )
    before, after = 2 * 3 / 4 * 6400 / 2000, 2 * 2 / 3 * 6400 / 2000
    text = run(path, "--lose", "0")
    assert "bound by exchange" in " ".join(text.split())
    assert f"{after:.2f} s (× {after / before:.3f})" in text


def test_one_of_a_kind_is_told_in_the_singular(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(changed(("slices = 4", "slices = 1")))
    assert "1 slice of custom, 2 hosts, 4 chips" in run(path, status=1)


def test_mistake_in_a_file_is_one_line_on_standard_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(changed(("slices = 4", "slices = 0")))
    command = [sys.executable, "-m", "elastic", "plan", str(path)]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=50)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"elastic: {path}, line 5: cluster.slices: Expected `int` >= 1")


def test_slices_that_do_not_name_any_are_refused(small: Path) -> None:
    result = CliRunner().invoke(cli, ["plan", str(small), "--lose", "first"])
    assert result.exit_code == 2
    assert "give indices such as 3 or 3,7" in result.output


@pytest.mark.parametrize(
    ("cases", "name"),
    [
        ([(3,)], "slice 3"),
        ([(0,), (1,), (2,)], "any of slices 0–2"),
        ([(4,), (0,), (1,)], "any of slices 0–1 and 4"),
        ([(0,), (2,), (4,), (5,)], "any of slices 0, 2 and 4–5"),
        ([(3, 7)], "slices 3 and 7 at once"),
    ],
)
def test_slices_are_named_as_people_say_it(cases: list[tuple[int, ...]], name: str) -> None:
    assert name_cases(cases) == name


def test_outcomes_of_another_kind_are_not_put_together() -> None:
    waits = [Outcome(event="loss", slices=(index,), verdict="waits", reason="few") for index in range(2)]
    both = Outcome(event="loss", slices=(0, 1), verdict="waits", reason="few")
    none = Outcome(event="loss", slices=(2,), verdict="no layout", reason="none")
    assert [len(group) for group in group_alike([*waits, both, none])] == [2, 1, 1]


def shell_examples() -> list[tuple[str, list[str]]]:
    """The commands of docs/planning.md, each with the lines that it is said to print."""
    blocks = re.findall(r"```console\n\$ elastic plan ([^\n]+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [(command, output.splitlines()) for command, output in blocks]


def what_stays(lines: list[str]) -> list[str]:
    """Leave out what depends on how fast this machine plans, and on which of equal hosts a plan takes."""
    varies = re.compile(r"│ (plan|without a new step|transfer|busiest \w+) |Goodput|transfer:")
    return [line.rstrip() for line in lines if not varies.match(line)]


@pytest.mark.parametrize(("command", "output"), shell_examples())
def test_commands_of_the_docs_print_what_the_docs_show(
    command: str, output: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    result = CliRunner().invoke(cli, ["plan", *command.split()], standalone_mode=False)
    shown = what_stays(result.output.splitlines())
    assert shown == what_stays(output)


def test_docs_show_a_plan_and_a_refusal() -> None:
    assert len(shell_examples()) == 2


def test_docs_have_the_table_of_accelerators() -> None:
    assert accelerator_table() in PAGE.read_text()


def accelerator_table() -> str:
    """The figures as a table in Markdown, a link to its source on each; what is missing is unpublished."""
    names = [accelerator.name for accelerator in ACCELERATORS]
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for name in FIGURES:
        figures = [accelerator.figure(name) for accelerator in ACCELERATORS]
        cells = ["unpublished" if f is None else f"[{f.value:.4g}]({f.source})" for f in figures]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)
