"""Random faults in a long run of the demo: a part of those of `faults.py`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import faults

from chaos.faults import parse_fault


def cases(num, seed=3, coordinator=False):
    return faults.Draw(seed=seed, coordinator=coordinator).cases(num)


def test_random_faults_are_those_of_the_seed_and_as_many_as_asked_for():
    assert cases(40) == cases(40)
    assert cases(40) != cases(40, seed=4)
    assert sum(len(case.faults) for case in cases(40)) == 40


def test_random_faults_are_faults_the_command_line_takes():
    for case in (*cases(300), *cases(300, coordinator=True)):
        for fault in case.faults:
            assert str(parse_fault(fault, case.slices)) == fault


def test_random_faults_have_every_kind_and_phase():
    written = " ".join(fault for case in cases(300) for fault in case.faults)
    assert all(
        what in written for what in (*faults.PRIMARY, *faults.COMPANION, *faults.SECOND, *faults.PHASES)
    )


def test_every_round_of_random_faults_has_one_that_brings_on_the_next():
    for case in cases(300, coordinator=True):
        by_round = {}
        for fault in (parse_fault(text, case.slices) for text in case.faults):
            by_round.setdefault(fault.at.round, []).append(str(fault).partition("=")[0].partition("@")[0])
        assert all(set(whats) & set(faults.PRIMARY) for whats in by_round.values()), case


def test_random_faults_strike_the_coordinator_if_asked_to():
    written = [fault for case in cases(300, coordinator=True) for fault in case.faults]
    assert any(fault.startswith("kill:coordinator@step") for fault in written)
    assert any(fault.startswith("kill:coordinator@phase") for fault in written)
    assert not any("coordinator" in fault for case in cases(300) for fault in case.faults)


def test_random_faults_never_take_the_memory_of_all_hosts_in_a_round():
    for case in cases(600):
        hosts = {}
        for fault in (parse_fault(text, case.slices) for text in case.faults):
            if fault.kind == "host":
                hosts.setdefault(fault.at.round, set()).update(fault.slices)
        assert all(len(lost) < case.slices for lost in hosts.values())


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_faults_are_all_recovered_and_leave_nothing(tmp_path, capfd):
    draw = faults.Draw(seed=1, per_run=4)
    tally = faults.soak(enumerate(draw.cases(4)), tmp_path, timeout_s=600)
    assert not tally.failed, capfd.readouterr().out
    assert tally.injected > 0
