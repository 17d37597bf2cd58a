"""Bounds in the wrong order are refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.bounds import check_order
from elastic.cli import cli
from elastic.job import JobSpec
from elastic.state import Config, Timing
from elastic.step_watch import StepWatch
from reshard.errors import UsageError


def spec(**fields: Any) -> JobSpec:
    return JobSpec(
        **{
            "job_id": "t",
            "directory": Path("/x"),
            "adapter": "local",
            "in_place": "no",
            "simulated_faults": True,
            "command": ("true",),
            "service_command": (),
            "config": Config(num_slices=2),
            **fields,
        }
    )


def test_order_is_checked_pair_by_pair_and_the_pair_is_named() -> None:
    check_order(a_s=1.0, b_s=2.0, c_s=3.0)
    with pytest.raises(
        UsageError, match=r"b_s \(2 s\) must be less than c_s \(2 s\)\. Lower b_s or raise c_s"
    ):
        check_order(a_s=1.0, b_s=2.0, c_s=2.0)
    with pytest.raises(UsageError, match="a_s must be more than 0 s"):
        check_order(a_s=0.0, b_s=2.0)


def test_not_a_number_is_in_no_order() -> None:
    with pytest.raises(UsageError):
        check_order(a_s=1.0, b_s=float("nan"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"heartbeat_s": 2.0}, "heartbeat_s .* agent_dead_s"),
        ({"agent_dead_s": 5.0}, "agent_dead_s .* suspect_s"),
        ({"config": Config(num_slices=2, timing=Timing(join_s=90.0)), "agent_dead_s": 4.0}, "suspect_s"),
        ({"worker_stopped_s": 6.0}, "worker_stopped_s .* suspect_s"),
        ({"worker_silent_s": 0.5}, "worker_heartbeat_s .* worker_silent_s"),
        ({"worker_silent_s": 40.0}, "worker_silent_s .* lease_s"),
        ({"lease_s": 40.0}, "two worlds could train"),
    ],
)
def test_job_refuses_bounds_in_the_wrong_order(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        spec(**fields)


def test_default_bounds_notice_a_silent_agent_within_a_second() -> None:
    default = spec()
    assert default.agent_dead_s + default.heartbeat_s <= 1.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"join_s": 3.0}, "suspect_s .* join_s"),
        ({"hang_after_s": 2.0}, "suspect_s .* hang_after_s"),
        ({"start_s": 4.0}, "suspect_s .* start_s"),
    ],
)
def test_timing_names_the_two_bounds_that_are_in_the_wrong_order(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Timing(**fields)


@pytest.mark.parametrize(("value", "said"), [("1", "must be less than hang_after_s"), ("soon", "'never'")])
def test_command_line_refuses_a_bound_that_cannot_be(tmp_path: Path, value: str, said: str) -> None:
    done = CliRunner().invoke(cli, ["demo", "--out", str(tmp_path / "run"), "--hang-after-s", value])
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)
    assert not (tmp_path / "run").exists()


def test_hang_bound_may_be_longer_than_that_of_the_first_step() -> None:
    timing = Timing(hang_after_s=900.0)
    assert StepWatch().bound_s(timing.hang_after_s or 0.0, timing.first_step_s) == 900.0
