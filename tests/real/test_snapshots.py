"""Copies on buddy slices and in the persistent tier, with real processes that are killed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import Run, assert_nothing_lost, demo, finish, start

from elastic.records import PersistFailed, SnapshotPersisted, WorldFormed, of_kind

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

SHARDED = "examples/sharded_optimizer.py"


def launch(directory: Path, *arguments: str, script: str = SHARDED) -> Run:
    """A job of one's own script, one device a host, to its end."""
    process = start(
        directory, "launch", "--devices-per-host", "1", "--out", str(directory), *arguments, "--", script
    )
    return finish(process, directory)


@pytest.mark.parametrize(
    ("replicas", "fault"), [("2", "host:slice=1@step=40"), ("3", "host:slice=0+2@step=40")]
)
@pytest.mark.family("hosts lost")
def test_hosts_lost_with_their_memory_lose_nothing_of_state_sharded_over_slices(
    tmp_path: Path, replicas: str, fault: str
) -> None:
    run = launch(tmp_path, "--replicas", replicas, "--fault", fault, "--rejoin-after-steps", "never")
    assert run.status == 0, run.output
    report = run.report
    assert (report.steps.committed, report.steps.lost, report.steps.repeated) == (120, 0, 0)
    (recovery,) = report.recoveries
    assert len(recovery.lost_slices) == int(replicas) - 1
    assert recovery.source_tiers.get("peer", 0) + recovery.source_tiers["shm"] > 0
    assert report.invariants["restored_equals_captured"] == "held"
    assert report.invariants["no_sample_lost"] == "held"


@pytest.mark.family("snapshots")
def test_all_hosts_lost_go_on_from_the_persistent_tier_and_the_next_run_from_its_end(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    persist = ("--persist-dir", str(tier), "--persist-every", "10")
    every = "host:slice=0+1+2@step=45"
    run = demo(tmp_path / "one", *persist, "--rejoin-after-steps", "0", faults=[every], steps=60)
    assert run.status == 0, run.output
    written = [record.step for record in of_kind(run.records, SnapshotPersisted)]
    (recovery,) = run.report.recoveries
    assert recovery.restored_step in written
    assert recovery.source_tiers["persistent"] > 0
    assert "were lost from memory" in recovery.explanation
    assert (run.report.steps.committed, run.report.steps.lost) == (60, 0)
    assert run.report.invariants["restored_equals_captured"] == "held"
    assert run.report.snapshots.persisted_step == 59

    again = demo(tmp_path / "two", *persist, "--slices", "2", steps=70)
    assert again.status == 0, again.output
    first = next(world for world in of_kind(again.records, WorldFormed) if world.mode == "first")
    assert first.restored_step == 59
    assert sorted(again.losses()) == list(range(60, 70))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB: less than one snapshot of the demo."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.family("snapshots")
def test_full_disk_is_told_and_training_goes_on(tmp_path: Path, small_disk: Path) -> None:
    tier = small_disk / "tier"
    persist = ("--persist-dir", str(tier), "--persist-every", "15")
    run = demo(tmp_path / "run", *persist, "--rejoin-after-steps", "3", faults=["kill:slice=1@step=30"])
    assert_nothing_lost(run)
    failures = of_kind(run.records, PersistFailed)
    assert failures
    assert any("No space left" in failure.reason for failure in failures), failures
    assert run.report.snapshots.persisted == 0
    assert "is NOT in the persistent tier" in run.output
    assert shutil.disk_usage(small_disk).used < 1 << 20, "a failed attempt keeps the disk full"
