"""Opening and forgetting local sessions: devices, clean-up, what cannot be done."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from local_jobs import make_spec, open_session, outcome, run
from waiting import wait_until

from chaos.faults import parse_fault
from controller_adapter.local import adapter
from controller_adapter.local.connect import live_engine
from controller_adapter.local.control import ENV_CONTROL_FD, ControlClient, Simulate, inherited, serve
from controller_adapter.local.defaults import choose_slices
from controller_adapter.local.faults import inject
from elastic.ports import JobOver
from elastic.records import FaultInjected, of_kind
from reshard.errors import UsageError


@pytest.mark.parametrize(
    ("devices", "slices"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 1), (6, 3), (7, 1), (8, 4), (64, 8), (9, 3)]
)
def test_choose_slices_divides_the_devices(devices: int, slices: int) -> None:
    assert choose_slices(devices) == slices


def test_forgotten_session_leaves_nothing_in_host_memory(tmp_path: Path, root: Path) -> None:
    spec = make_spec(tmp_path, root)
    session = open_session(spec)
    assert next(session.worlds()).slices == (0, 1, 2)
    assert list(root.iterdir())
    del session
    gc.collect()
    assert not list(root.iterdir())
    assert "the script ended before its training loop did" in outcome(spec).report.run.error


def test_second_session_of_a_process_ends_the_first(tmp_path: Path, root: Path) -> None:
    first = make_spec(tmp_path / "first", root)
    session = open_session(first)
    next(session.worlds())
    result = run(make_spec(tmp_path / "second", root), steps=2)
    assert result.report.run.outcome == "completed"
    with pytest.raises(JobOver, match="ended before"):
        next(session.worlds())


def test_too_few_devices_are_said_before_anything_is_made(tmp_path: Path, root: Path) -> None:
    with pytest.raises(UsageError, match="5 slices of 2 devices need 10, JAX has 8"):
        open_session(make_spec(tmp_path, root, num_slices=5))
    assert not list(root.iterdir())


def test_fault_of_an_agent_is_refused(tmp_path: Path, root: Path) -> None:
    with pytest.raises(UsageError, match="cannot simulate kill of agent=1"):
        adapter().launcher(make_spec(tmp_path, root), [parse_fault("agent:slice=1@step=3", 3)])


def test_inject_without_a_session_says_so() -> None:
    with pytest.raises(UsageError, match="no local session"):
        inject("kill", 1)


def test_inject_refuses_a_slice_that_is_not_there(tmp_path: Path, root: Path) -> None:
    session = open_session(make_spec(tmp_path, root))
    with pytest.raises(UsageError, match="there is no slice 7"):
        inject("kill", 7)
    del session


def test_launcher_reaches_the_engine_and_is_answered(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(tmp_path, root)
    session = open_session(spec)
    client = ControlClient()
    monkeypatch.setenv(ENV_CONTROL_FD, str(os.dup(client.child_end.fileno())))
    connection = inherited()
    assert connection is not None
    assert ENV_CONTROL_FD not in os.environ
    engine = live_engine()
    assert engine is not None
    thread = serve(connection, engine)
    worlds = session.worlds()
    next(worlds)
    assert client.ask(Simulate(kind="kill", slices=(1,))) == ""
    assert "there is no slice 9" in client.ask(Simulate(kind="kill", slices=(9,)))
    assert client.ask(FaultInjected(unix_s=1.0, fault="kill", slice_index=1)) == ""
    client.stop("enough")
    # Until it has come there may be another world, of the slices that are left.
    wait_until(lambda: engine.pump() or engine.is_failed())
    with pytest.raises(JobOver, match="enough"):
        next(worlds)
    assert len(of_kind(outcome(spec).records, FaultInjected)) == 1
    client.close()
    thread.join(timeout=5)
    worlds.close()


def test_virtual_slices_of_several_hosts_are_refused_before_anything_is_started(
    tmp_path: Path, root: Path
) -> None:
    spec = make_spec(tmp_path, root, hosts_per_slice=2)
    with pytest.raises(UsageError, match="one host each"):
        adapter().launcher(spec, ())
    assert list(root.iterdir()) == []
