"""What a job's processes find in its directory is what the command line asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.cadence import EVERY_STEP, Cadence, EverySeconds, EverySteps, StallBudget
from elastic.cli import cli
from elastic.job import JobSpec, load_job, save_job
from elastic.runs import HostsSpec, Wanted, prepare
from elastic.state import Config, Timing
from reshard.errors import UsageError


def prepared(directory: Path, **wanted: Any) -> JobSpec:
    spec, _ = prepare(
        Wanted(
            command=("true",),
            adapter="local",
            directory=directory,
            seed=0,
            target_steps=3,
            faults=(),
            **({"config": Config(num_slices=2)} | wanted),
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


def test_hosts_get_their_command_and_address_from_the_command_line(tmp_path: Path) -> None:
    hosts = HostsSpec(bind_host="10.0.0.1", prefix=("on", "host-{slice}"), agent_bind_host="10.0.0.1{slice}")
    save_job(prepared(tmp_path, hosts=hosts))
    spec = load_job(tmp_path)
    assert spec.bind_host == "10.0.0.1"
    assert spec.on_host(1) == ("on", "host-1")
    assert spec.bind_host_of(1) == "10.0.0.11"


def test_hosts_of_a_slice_get_their_own_command_and_address(tmp_path: Path) -> None:
    hosts = HostsSpec(
        bind_host="10.0.0.1", prefix=("on", "{slice}-{host}"), agent_bind_host="10.{slice}.0.{host}"
    )
    spec = prepared(tmp_path, hosts=hosts, config=Config(num_slices=2, hosts_per_slice=2))
    assert [spec.on_host(member)[1] for member in range(4)] == ["0-0", "0-1", "1-0", "1-1"]
    assert spec.bind_host_of(3) == "10.1.0.1"


def test_agents_listen_where_the_coordinator_does_unless_told_otherwise(tmp_path: Path) -> None:
    spec = prepared(tmp_path)
    assert (spec.on_host(1), spec.bind_host_of(1)) == ((), "127.0.0.1")


def test_worker_is_given_less_silence_than_a_short_lease(tmp_path: Path) -> None:
    config = Config(num_slices=2, timing=Timing(lease_s=9.0))
    spec = prepared(tmp_path, lease_s=9.0, config=config)
    assert (spec.lease_s, spec.worker_silent_s) == (9.0, 6.0)
