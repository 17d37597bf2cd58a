"""A slice that is slow, in its input or on its devices, is named with how much; training goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import assert_nothing_lost
from small_scripts import launch

from elastic.records import StragglerSeen, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = ("--slices", "3", "--rehearsals", "0")
FREEZERS = Path("/sys/fs/cgroup/freezer")
FROZEN_S, THAWED_S = 0.008, 0.002


def test_slice_whose_input_sleeps_is_told_with_its_factor(tmp_path: Path) -> None:
    read = 'time.sleep(0.05 * (SLICE == "1"))'
    run = launch(tmp_path, "pass", *OPTIONS, read=read, steps=80)
    assert_nothing_lost(run, steps=80)
    first = next(one for one in of_kind(run.records, StragglerSeen) if one.where == "input")
    assert first.slice_index == 1
    assert first.own_s >= 0.05
    assert first.factor > 1.5
    assert first in run.report.stragglers
    assert "Slice 1 is slow (seen at step" in run.output


@pytest.fixture
def duty_cycle(tmp_path: Path) -> Iterator[Path]:
    """A control group whose processes run for a fifth of the time."""
    group = FREEZERS / f"elastic-test-{tmp_path.name}"
    try:
        group.mkdir()
        (group / "freezer.state").write_text("THAWED")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no process can be frozen here: {error}")
    ended = threading.Event()

    def pulse() -> None:
        while not ended.is_set():
            for state, for_s in (("FROZEN", FROZEN_S), ("THAWED", THAWED_S)):
                (group / "freezer.state").write_text(state)
                ended.wait(for_s)
        (group / "freezer.state").write_text("THAWED")

    pulses = threading.Thread(target=pulse)
    pulses.start()
    yield group
    ended.set()
    pulses.join()
    group.rmdir()


def test_slice_whose_devices_are_slow_is_told(tmp_path: Path, duty_cycle: Path) -> None:
    prepare = "import elastic.device_pace as pace; pace.MIN_PAUSE_S, pace.SHARE = 0.1, 0.1"
    body = f"""
        if SLICE == "2":
            pathlib.Path({str(duty_cycle / "cgroup.procs")!r}).write_text(str(os.getpid()))
    """
    run = launch(tmp_path, body, *OPTIONS, prepare=prepare, read="time.sleep(0.02)", steps=200)
    assert_nothing_lost(run, steps=200)
    told = [one for one in of_kind(run.records, StragglerSeen) if one.where == "device"]
    assert told
    assert told[0].slice_index == 2
    assert told[0].own_s > 1.5 * told[0].others_s
