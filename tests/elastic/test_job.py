"""What a job's processes find in its directory is what the command line asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic.cadence import EVERY_STEP, Cadence, EverySeconds, EverySteps, StallBudget
from elastic.cli import cli
from elastic.job import JobSpec, load_job, save_job
from elastic.runs import Wanted, prepare
from elastic.state import Config
from reshard.errors import UsageError


def prepared(directory: Path, **wanted: Cadence) -> JobSpec:
    spec, _ = prepare(
        Wanted(
            command=("true",),
            adapter="local",
            config=Config(num_slices=2),
            directory=directory,
            seed=0,
            target_steps=3,
            faults=(),
            **wanted,
        )
    )
    return spec


@pytest.mark.parametrize(
    "cadence", [EverySteps(steps=7), EverySeconds(seconds=1.5), StallBudget(fraction=0.03)]
)
def test_cadence_gets_from_the_command_line_to_the_workers(tmp_path: Path, cadence: Cadence) -> None:
    spec = prepared(tmp_path, cadence=cadence)
    save_job(spec)
    assert load_job(tmp_path) == spec
    assert spec.cadence == cadence


def test_every_step_is_captured_unless_told_otherwise(tmp_path: Path) -> None:
    assert prepared(tmp_path).cadence == EVERY_STEP


def test_damaged_cadence_of_a_job_is_an_error(tmp_path: Path) -> None:
    save_job(prepared(tmp_path))
    path = tmp_path / "job.json"
    path.write_text(path.read_text().replace('"steps": 1', '"steps": "often"'))
    with pytest.raises(UsageError, match="cannot be read"):
        load_job(tmp_path)


@pytest.mark.parametrize("text", ["often", "0", "auto:0%"])
def test_bad_cadence_is_refused_before_anything_is_started(tmp_path: Path, text: str) -> None:
    done = CliRunner().invoke(cli, ["demo", "--out", str(tmp_path / "run"), "--snapshot-every", text])
    assert done.exit_code == 2
    assert "--snapshot-every" in done.output
    assert "auto:3%" in done.output or "between" in done.output or "above 0 %" in done.output
    assert not (tmp_path / "run").exists()
