"""The writer process: what it reports, also when things go wrong, and what is left when it is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from persist_helpers import facts_of, persist_tiny, tiny_layout, tiny_slots, write_tiny
from snapshot_helpers import REPOSITORY, flip

from reshard.errors import MissingShardError, PersistentTierError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from reshard.persist_shares import persist_shares
from snapshot.persist import begin
from snapshot.persist_finish import finish
from snapshot.persist_jobs import Done, Failed, FinishJob, Job, WriteJob, decode_report, failed
from snapshot.persist_list import list_persisted
from snapshot.persist_process import WriterProcess
from snapshot.persist_source import PersistentSource
from snapshot.slot_reader import SlotReader

HOST = HostId(0)
TINY = tiny_layout()


@pytest.fixture
def run(root: Path) -> Path:
    path = root / "run"  # in memory: fsync costs nothing
    path.mkdir()
    return path


def write_job(
    staging: Path,
    slots: dict[HostId, Path],
    host: HostId = HOST,
    step: int = 1,
    layout: Layout = TINY,
) -> WriteJob:
    return WriteJob(
        staging=str(staging),
        slots=(str(slots[host]),),
        step=step,
        generation=1,
        layout=layout,
        tree=facts_of(layout).tree,
        shards=persist_shares(layout)[host],
    )


def outcome(job: Job, prefix: Sequence[str] = ()) -> Done | Failed:
    return WriterProcess(job, prefix=prefix).wait()


def test_shares_of_all_hosts_and_the_finish_make_a_snapshot(run: Path, tmp_path: Path):
    persist_tiny(run, tmp_path, step=0)
    slots = tiny_slots(tmp_path)
    staging = begin(run, 1, 1)
    processes = [WriterProcess(write_job(staging, slots, host)) for host in slots]
    seen: list[int] = []
    results = [process.wait(seen.append) for process in processes]
    assert all(isinstance(result, Done) for result in results)
    total = sum(array.nbytes for array in tiny_layout().arrays)
    assert sum(result.written_bytes for result in results if isinstance(result, Done)) == total
    assert max(seen) == max(result.written_bytes for result in results if isinstance(result, Done))
    done = outcome(FinishJob(root=str(run), staging=str(staging), facts=facts_of(tiny_layout()), keep=1))
    assert done == Done(path=str(run / "1"), generation=1, removed=(0,))
    assert PersistentSource(run / "1").verify() == ()


def test_a_shard_that_is_missing_is_the_fault_of_the_source_only_for_a_share():
    error = MissingShardError("w", ((0, 1),), 3)
    assert failed(error).kind == "missing-shard"
    assert failed(error, []).kind == "overwritten-source"
    assert failed(error, ["slot0: overwritten while 'w' was read"]).kind == "overwritten-source"
    assert failed(error, ["slot0: bytes of 'w' do not match"]).kind == "corrupt-source"
    assert failed(PersistentTierError("no-space", "full")).kind == "persistent-tier:no-space"


def test_a_damaged_shard_is_never_written(run: Path, tmp_path: Path):
    slots = tiny_slots(tmp_path)
    with SlotReader(slots[HOST]) as reader:
        manifest = reader.read_manifest()
    assert manifest is not None
    job = write_job(begin(run, 1, 1), slots)
    entry = next(
        entry for entry in manifest.static.shards if (entry.path, entry.box) in job.shards and entry.nbytes
    )
    data_offset = slots[HOST].read_bytes().rindex(_shard(slots[HOST], entry.offset, entry.nbytes))
    flip(slots[HOST], data_offset)
    result = outcome(job)
    assert isinstance(result, Failed)
    assert result.kind == "corrupt-source"
    assert entry.path in result.message
    assert "do not match their checksum" in result.message


def _shard(slot: Path, offset: int, nbytes: int) -> bytes:
    with SlotReader(slot) as reader:
        manifest = reader.read_manifest()
        assert manifest is not None
        index = next(
            i
            for i, entry in enumerate(manifest.static.shards)
            if (entry.offset, entry.nbytes) == (offset, nbytes)
        )
        return reader.read_shard(index).tobytes()


def test_a_slot_that_holds_another_step_by_now_is_said(run: Path, tmp_path: Path):
    result = outcome(write_job(begin(run, 2, 1), tiny_slots(tmp_path, step=1), step=2))
    assert isinstance(result, Failed)
    assert result.kind == "overwritten-source"


def test_a_staging_directory_that_went_is_said_and_not_made_anew(run: Path, tmp_path: Path):
    result = outcome(write_job(run / "gone", tiny_slots(tmp_path)))
    assert isinstance(result, Failed)
    assert result.kind == "persistent-tier:missing"
    assert not (run / "gone").exists()


def test_a_file_size_limit_counts_as_no_space(run: Path, tmp_path: Path):
    result = outcome(write_job(begin(run, 1, 1), tiny_slots(tmp_path)), ("prlimit", "--fsize=5"))
    assert isinstance(result, Failed)
    assert result.kind == "persistent-tier:no-space"
    assert "File too large" in result.message
    assert list_persisted(run) == ()


def in_mount(options: str, then: str = ":") -> tuple[str, ...]:
    script = f'mount -t tmpfs -o {options} none "$0" && mkdir -p "$0/staging" && {then} && exec "$@"'
    return "unshare", "--mount", "bash", "-c", script


def can_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, check=False).returncode == 0


needs_mount = pytest.mark.skipif(os.geteuid() != 0 or not can_mount(), reason="needs mount namespaces")


@needs_mount
@pytest.mark.parametrize(
    ("options", "then", "reason", "text"),
    [
        ("nr_inodes=4", ":", "no-space", "No space left on device"),
        ("size=1m", 'mount -o remount,ro "$0"', "permission", "Read-only file system"),
    ],
)
def test_a_full_or_read_only_file_system_is_said(
    run: Path, tmp_path: Path, options: str, then: str, reason: str, text: str
):
    job = write_job(run / "staging", tiny_slots(tmp_path))
    result = outcome(job, (*in_mount(options, then), str(run)))
    assert isinstance(result, Failed)
    assert result.kind == f"persistent-tier:{reason}"
    assert text in result.message


def test_a_writer_that_is_killed_leaves_only_staging_and_the_retry_finishes(run: Path, tmp_path: Path):
    slots = tiny_slots(tmp_path)
    staging = begin(run, 1, 1)
    for num_reports in range(2):
        process = WriterProcess(write_job(staging, slots))
        left = [num_reports]

        def kill(written_bytes: int, left: list[int] = left, pid: int = process.pid) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(pid, signal.SIGKILL)

        result = process.wait(kill)
        assert isinstance(result, Done) or result.kind == "persistent-tier:stopped"
        assert list_persisted(run) == ()
    assert write_tiny(run, tmp_path) == staging
    assert PersistentSource(finish(run, staging, facts_of(tiny_layout())).path).verify() == ()


@pytest.mark.slow
def test_a_writer_killed_anywhere_in_a_large_share_leaves_what_the_retry_completes(run: Path, root: Path):
    arrays = tuple(
        ArrayLayout(path=f"[{index}]", shape=(256, 1024), dtype="float32", itemsize=4, spec=(("data",),))
        for index in range(200)
    )
    layout = replace(TINY, arrays=arrays)
    slots = tiny_slots(root, layout=layout)
    staging = begin(run, 1, 1)
    stopped = 0
    for seed in range(12):
        process = WriterProcess(write_job(staging, slots, layout=layout))
        kill_at = random.Random(seed).randrange(sum(array.nbytes for array in arrays) // 2)

        def kill(written_bytes: int, kill_at: int = kill_at, pid: int = process.pid) -> None:
            if written_bytes >= kill_at:
                os.kill(pid, signal.SIGKILL)

        stopped += process.wait(kill) == Failed(
            kind="persistent-tier:stopped",
            message="the writer process ended with status -9 before it was done",
            remedy="Write it again.",
        )
        assert list_persisted(run) == ()
    assert stopped > 6
    for host in slots:
        assert isinstance(outcome(write_job(staging, slots, host, layout=layout)), Done)
    made = finish(run, staging, facts_of(layout))
    assert PersistentSource(made.path).verify() == ()
    assert list(made.path.rglob("*__lock")) == []


def test_a_writer_ends_with_its_input(run: Path, tmp_path: Path):
    process = WriterProcess(write_job(begin(run, 1, 1), tiny_slots(tmp_path)))
    process.stop()
    result = process.wait()
    assert isinstance(result, Failed)
    assert (result.kind, "status 3" in result.message) == ("persistent-tier:stopped", True)


def test_what_is_no_job_is_refused():
    command = [sys.executable, "-m", "snapshot.persist_writer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"{}\n")
        process.stdin.flush()
        report = decode_report(process.stdout.read())
    assert isinstance(report, Failed)
    assert (report.kind, process.returncode) == ("usage", 2)


def test_neither_writer_nor_reader_loads_jax_orbax_or_grpc():
    code = "import sys, snapshot.persist_writer, snapshot.persist_process, snapshot.persist_finish\n"
    code += "import snapshot.persist_source\n"
    code += "print(sorted({'jax', 'orbax', 'grpc'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert result.stdout == "[]\n"


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test catches it."""


@pytest.mark.parametrize("replaces", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_finish_that_ends_at_any_call_leaves_a_whole_snapshot_or_none(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
):
    restored = {2: 0} if replaces else {}
    generation = 2 if replaces else 1
    ended_at: int | None = None
    for calls_left in range(200):
        shutil.rmtree(run)
        if replaces:
            persist_tiny(run, tmp_path, generation=1)
        run.mkdir(exist_ok=True)
        staging = write_tiny(run, tmp_path, generation=generation)
        left = [calls_left]

        with monkeypatch.context() as patch:
            for name in ("rename", "fsync", "unlink", "open", "rmdir"):
                patch.setattr(os, name, _dying(getattr(os, name), left))
            try:
                finish(run, staging, facts_of(tiny_layout(), generation=generation), restored_steps=restored)
                ended_at = calls_left
            except Killed:
                pass
        whole = list_persisted(run)
        assert len(whole) <= 1
        assert all(PersistentSource(one.path).verify() == () for one in whole)
        if ended_at is not None:
            break
    assert ended_at is not None
    assert ended_at > 10
    assert [one.generation for one in list_persisted(run)] == [generation]


def _dying(call: object, left: list[int]) -> object:
    def wrapped(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return call(*args, **kwargs)  # type: ignore[operator]

    return wrapped
