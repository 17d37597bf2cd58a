"""No process traces in a recovery or a join: each has played the world of that size alone before."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from momentum_loop import HOLD_OPTIONS, TRACES, write_script
from real_runs import assert_nothing_lost, finish, left_behind, start

from elastic.records import WorkerEvent, WorldFormed, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 80


def test_lost_and_joining_slices_trace_each_size_once_and_before_their_turn(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, num_rows=64, num_columns=8, axes='{"data": -1}', specs='{"w": P(), "m": P(), "n": P()}',
        steps=STEPS, held_until_ready=4, num_slices_at_end=3,
    )  # fmt: skip
    out = tmp_path / "run"
    process = start(
        tmp_path, "launch", "--slices", "3", "--devices-per-host", "1", "--rejoin-after-steps", "3",
        "--fault", "kill:slice=0@step=15", *HOLD_OPTIONS, "--out", str(out), "--", str(script),
    )  # fmt: skip
    run = finish(process, out)
    assert_nothing_lost(run, STEPS)
    assert left_behind(run.report.run.id) == []
    formed = [world.slices for world in of_kind(run.records, WorldFormed)]
    assert formed == [(0, 1), (0, 1, 2), (1, 2), (0, 1, 2)]
    traced: dict[int, list[tuple[int, float]]] = {}
    for line in (out / TRACES).read_text().splitlines():
        pid, num_slices, unix_s = line.split()
        traced.setdefault(int(pid), []).append((int(num_slices), float(unix_s)))
    ready = [event for event in of_kind(run.records, WorkerEvent) if event.state == "ready"]
    for event in ready:
        assert Counter(size for size, _ in traced[event.pid]) == {2: 1, 3: 1}
    joined_s, joiner = ready[-1].unix_s, ready[-1].pid
    assert all(unix_s < joined_s for _, unix_s in traced[joiner])
