"""Clean-up removes what dead jobs left, and never what a live one uses."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from snapshot_helpers import HOST, reserve, start_python, steps, write_into

from reshard.errors import UsageError
from snapshot.arena import Arena
from snapshot.gc import collect, find_garbage, list_jobs
from snapshot.job import JobLock

HOLD_ARENA = """
import sys
from pathlib import Path
from snapshot.arena import Arena
from snapshot_helpers import HOST, reserve, write_into
arena = Arena.create(sys.argv[2], HOST, root=Path(sys.argv[1]))
reserve(arena)
write_into(arena, 1)
print("ready", flush=True)
sys.stdin.read()
"""


def leave_behind(root: Path, job_id: str) -> Path:
    arena = Arena.create(job_id, HOST, root=root)
    reserve(arena)
    write_into(arena, 1)
    arena.close()
    return arena.directory


def test_collect_removes_a_dead_job_and_says_what_went(root: Path) -> None:
    directory = leave_behind(root, "dead")
    removed = collect(root)
    assert set(removed.directories) == {str(directory), str(directory.parent)}
    assert removed.freed_bytes >= 2 * 4096
    assert list(root.iterdir()) == []
    assert collect(root) == type(removed)()


def test_collect_spares_a_live_process_and_takes_its_files_after_sigkill(root: Path) -> None:
    child = start_python(HOLD_ARENA, root, "live")
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    leave_behind(root, "dead")
    assert [(job.job_id, job.is_alive) for job in list_jobs(root)] == [("dead", False), ("live", True)]
    collect(root)
    assert [path.name for path in root.iterdir()] == ["elastic-live"]
    observer = Arena.attach("live", HOST, root=root)
    assert steps(observer.manifests().complete) == [1]
    observer.close()
    child.kill()
    child.wait()
    assert [job.is_alive for job in list_jobs(root)] == [False]
    collect(root)
    assert list(root.iterdir()) == []
    child.stdin.close()
    child.stdout.close()


def test_launcher_alone_keeps_the_job_alive(root: Path) -> None:
    lock = JobLock.acquire("job", root=root)
    leave_behind(root, "job")
    assert collect(root).directories == ()
    lock.release()
    assert len(collect(root).directories) == 2


def test_two_launchers_cannot_hold_one_job(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshot.job.LOCK_TIMEOUT_S", 0.0)
    lock = JobLock.acquire("job", root=root)
    with pytest.raises(UsageError, match="already running"):
        JobLock.acquire("job", root=root)
    lock.unlink()
    assert list(root.iterdir()) == []
    JobLock.acquire("job", root=root).unlink()


def test_two_collections_at_once_remove_everything_once(root: Path) -> None:
    for index in range(8):
        leave_behind(root, f"dead{index}")
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: collect(root), range(2)))
    collect(root)  # what one left to the other while both looked
    names = [name for removed in both for name in removed.directories]
    assert len(names) == len(set(names))
    assert list(root.iterdir()) == []


def test_jobs_start_while_collections_run(root: Path) -> None:
    def start(index: int) -> list[int]:
        arena = Arena.create(f"job{index % 3}", HOST, root=root)
        reserve(arena)
        write_into(arena, index)
        found = steps(arena.manifests().complete)
        arena.close()
        return found

    with ThreadPoolExecutor(3) as pool:
        collections = [pool.submit(lambda: [collect(root) for _ in range(40)]) for _ in range(2)]
        for index in range(40):
            assert index in start(index)
        for future in collections:
            future.result()


def test_foreign_files_and_directories_stay(root: Path) -> None:
    (root / "elastic-search").mkdir()
    (root / "elastic-search" / "data").write_text("not ours")
    (root / "elastic-file").write_text("not ours")
    directory = leave_behind(root, "dead")
    (directory / "notes.txt").write_text("not ours")
    (root / "elastic-link").symlink_to(directory.parent)
    collect(root)
    assert (root / "elastic-search" / "data").exists()
    assert (root / "elastic-file").exists()
    assert (root / "elastic-link").is_symlink()
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_empty_directory_with_the_name_of_a_job_goes_when_it_is_old(root: Path) -> None:
    for name, mode in (("elastic-new", 0o700), ("elastic-old", 0o700), ("elastic-shared", 0o755)):
        (root / name).mkdir(mode=mode)
        if name != "elastic-new":
            os.utime(root / name, (0, 0))
    assert find_garbage(root).directories == (str(root / "elastic-old"),)
    assert collect(root).directories == (str(root / "elastic-old"),)
    assert sorted(path.name for path in root.iterdir()) == ["elastic-new", "elastic-shared"]


def test_find_garbage_names_what_collect_would_remove_and_touches_nothing(root: Path) -> None:
    directory = leave_behind(root, "dead")
    arena = Arena.create("live", HOST, root=root)
    before = sorted(root.rglob("*"))
    found = find_garbage(root)
    assert set(found.directories) == {str(directory), str(directory.parent)}
    assert sorted(root.rglob("*")) == before
    assert collect(root) == found
    arena.unlink()


def test_list_jobs_leaves_no_trace(root: Path) -> None:
    arena = Arena.create("job", HOST, root=root)
    (job,) = list_jobs(root)
    assert (job.is_alive, job.hosts) == (True, (HOST,))
    assert not (root / "elastic-job" / "lock").exists()
    arena.unlink()
