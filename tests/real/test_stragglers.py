"""A slice that is slow, in its input or on its devices, is named with how much; training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_runs import assert_nothing_lost
from small_scripts import launch

from elastic.records import StragglerSeen, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = ("--slices", "3", "--rehearsals", "0")


@pytest.mark.family("stragglers")
def test_slice_whose_input_sleeps_is_told_with_its_factor(tmp_path: Path) -> None:
    read = 'time.sleep(0.05 * (SLICE == "1"))'
    run = launch(tmp_path, "pass", *OPTIONS, read=read, steps=120)
    assert_nothing_lost(run, steps=120)
    first = next(one for one in of_kind(run.records, StragglerSeen) if one.where == "input")
    assert first.slice_index == 1
    assert first.own_s >= 0.05
    assert first.factor > 1.5
    assert first in run.report.stragglers
    assert "Slice 1 is slow (seen at step" in run.output


@pytest.mark.family("stragglers")
def test_slice_whose_devices_are_slow_is_told(tmp_path: Path) -> None:
    """Its timed program has ten times as much to do, which is what a slow device looks like from outside."""
    prepare = """
        import elastic.device_pace as pace
        pace.FIRST_AFTER_S = pace.MIN_PAUSE_S = pace.MAX_PAUSE_S = 0.1
        pace.PRODUCTS *= 10 if SLICE == "2" else 1
    """
    run = launch(tmp_path, "pass", *OPTIONS, prepare=prepare, read="time.sleep(0.02)", steps=300)
    assert_nothing_lost(run, steps=300)
    told = [one for one in of_kind(run.records, StragglerSeen) if one.slice_index == 2]
    assert [one.where for one in told] == ["device"]
    assert told[0].factor > 1.5
    assert "a program on its devices takes" in run.output
