"""The table of the recovery state machine is total, and the machine is pure."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from elastic import machine
from elastic.events import (
    AgentAttached,
    Event,
    Phase,
    Shutdown,
    StopRequested,
    Tick,
    WorkerState,
)
from elastic.state import Config, Timing, initial_state
from elastic.turn import Clock
from reshard.errors import UsageError


def test_table_decides_every_event_in_every_phase() -> None:
    assert set(machine.EVENTS) == set(get_args(Event))
    missing = [
        (phase.value, kind.__name__)
        for phase in Phase
        for kind in get_args(Event)
        if kind not in machine.TABLE.get(phase, {})
    ]
    assert missing == []


def test_architecture_page_shows_the_table_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    header, _, *rows = page[page.index("| event | WAITING |") :].split("\n\n")[0].splitlines()
    phases = [cell.split(", ") for cell in cells_of(header)[1:]]
    shown = {
        (phase, event): reaction
        for events, *reactions in map(cells_of, rows)
        for event in events.split(", ")
        for names, reaction in zip(phases, reactions, strict=True)
        for phase in names
    }
    assert shown == {
        (phase.value, kind.__name__): "–"
        if reaction is machine.ignore
        else reaction.__name__.replace("_", " ")
        for phase, row in machine.TABLE.items()
        for kind, reaction in row.items()
    }


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_table_has_an_advance_for_every_phase() -> None:
    assert set(machine._ADVANCE) == set(Phase)


@pytest.mark.parametrize("phase", [Phase.COMPLETED, Phase.FAILED])
def test_ended_job_only_releases_hosts_that_come_late(phase: Phase) -> None:
    now = Clock(mono_s=1.0, unix_s=1.0)
    state, _ = machine.step(initial_state(Config(num_slices=2), 0.0), StopRequested(reason="Ctrl-C"), now)
    for kind in machine.EVENTS:
        assert (machine.TABLE[phase][kind] is machine.ignore) == (kind is not AgentAttached)
    attached = AgentAttached(member=1, worker=WorkerState.NONE, worker_pid=0, generation=0, data_address="")
    after, commands = machine.step(state, attached, now)
    assert after == state
    assert commands == (Shutdown(member=1, completed=False),)
    assert machine.step(state, Tick(), now) == (state, ())


def test_machine_loads_neither_jax_nor_a_shell() -> None:
    code = (
        "import sys, elastic.machine\n"
        "ours = {n for n in sys.modules if n.split('.')[0] in ('elastic', 'snapshot', 'reshard')}\n"
        "print('jax' in sys.modules, sorted(n for n in ours if n.startswith('snapshot')))\n"
        "import inspect\n"
        "pure = [n for n in ours if n.startswith(('elastic.moves', 'elastic.machine', 'elastic.facts',"
        " 'elastic.turn', 'elastic.state', 'elastic.choose', 'elastic.events'))]\n"
        "banned = ('time', 'random', 'os', 'threading')\n"
        "print([n for n in pure if any(hasattr(sys.modules[n], b) for b in banned)], len(pure) > 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False []\n[] True\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_slices": 0}, "slices must be at least 1"),
        ({"num_slices": 2, "min_slices": 3}, "min-slices must be between 1 and 2"),
        ({"num_slices": 2, "replicas": 0}, "replicas must be at least 1"),
    ],
)
def test_config_refuses_what_cannot_work(config: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Config(**config)  # type: ignore[arg-type]


def test_timing_refuses_bounds_in_the_wrong_order() -> None:
    with pytest.raises(UsageError, match=r"unwind_s \(5 s\) must be less than suspect_s \(4 s\)"):
        Timing(unwind_s=5.0)
    with pytest.raises(UsageError, match=r"agent_grace_s \(4 s\) must be less than lease_s \(3 s\)"):
        Timing(lease_s=3.0)
