"""Demo runs with random faults complete, lose nothing and leave nothing: two of those of `demo_runs.py`."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import demo_runs
from demo_jobs import DemoCase, DemoRun


def test_random_cases_of_a_seed_do_not_depend_on_how_many_there_are():
    few = demo_runs.random_cases(3, seed=5, kinds=demo_runs.KINDS, slices=3, steps=100)
    many = demo_runs.random_cases(30, seed=5, kinds=demo_runs.KINDS, slices=3, steps=100)
    assert many[:3] == few


def test_random_cases_never_take_all_slices():
    for slices in (2, 3, 5):
        for case in demo_runs.random_cases(200, seed=0, kinds=("kill",), slices=slices, steps=10):
            victims = case.faults[0].partition("slice=")[2].partition("@")[0].split("+")
            assert len(set(victims)) == len(victims) < slices


def test_random_cases_are_faults_the_command_line_takes():
    from chaos.faults import parse_fault

    for case in demo_runs.random_cases(100, seed=3, kinds=demo_runs.KINDS, slices=3, steps=100):
        assert str(parse_fault(case.faults[0], case.slices)) == case.faults[0]


def test_what_is_wrong_names_a_run_without_end_and_report(tmp_path):
    run = DemoRun(
        case=DemoCase(), directory=tmp_path, status=None, wall_s=1.0, report=None, left=("process 1 (x)",)
    )
    assert demo_runs.what_is_wrong(run) == ["left process 1 (x)", "did not end in time", "no report"]
    assert "exit status 3" in demo_runs.what_is_wrong(dataclasses.replace(run, status=3))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.family("one slice lost")
def test_two_random_demo_runs_complete_and_leave_nothing(tmp_path, capfd):
    cases = demo_runs.random_cases(2, seed=1, kinds=demo_runs.KINDS, slices=3, steps=30)
    failed = demo_runs.soak(cases, tmp_path, timeout_s=240)
    assert not failed, capfd.readouterr().out
