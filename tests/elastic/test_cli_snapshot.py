"""`elastic snapshot` says what is in host memory, finds damage, reads arrays and cleans up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from view_helpers import EMPTY, SPLIT, WHOLE, A, B, capture_step, make_arena, static_of

from elastic.cli import main
from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.array_summary import save_array, summarise

Pair = tuple[Arena, Arena]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture
def pair(root: Path) -> Iterator[Pair]:
    arenas = make_arena(root, A, 1, 2), make_arena(root, B, 1, 2)
    yield arenas
    for arena in arenas:
        arena.close()


@pytest.fixture
def run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run_command(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["elastic", "snapshot", *args, "--shm-dir", str(root)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run_command


def damage(arena: Arena, slot: str, data: bytes) -> None:
    path = arena.directory / slot
    offset = path.read_bytes().rindex(data)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([data[0] ^ 0xFF]))


def two(dtype: type = np.float32, count: int = 64) -> bytes:
    return np.full(count, 2, dtype).tobytes()


def test_ls_shows_each_slot_of_each_host_and_the_newest_covered_step(
    run: Run, pair: Pair, root: Path
) -> None:
    capture_step(pair[0], 3)
    make_arena(root, A, 7, job_id="old").close()
    status, out, _ = run("ls")
    assert status == 0
    assert "elastic-job: live, s0h0, s1h0" in out
    assert "elastic-old: dead, s0h0" in out
    lines = [line.split() for line in out.splitlines() if line.startswith((" s0h0", " s1h0"))]
    assert [line[:4] for line in lines[:4]] == [
        ["s0h0", "slot0", "3", "1"],
        ["s0h0", "slot1", "2", "1"],
        ["s1h0", "slot0", "1", "1"],
        ["s1h0", "slot1", "2", "1"],
    ]
    assert ["newest" in line for line in lines] == [False, True, False, True, False, False]
    assert run("ls", "old")[1].count("elastic-") == 1


def test_ls_as_json_has_jobs_with_slots(run: Run, pair: Pair) -> None:
    (pair[1].directory / "slot0").write_bytes(b"#!/bin/sh")
    (job,) = json.loads(run("ls", "--json")[1])
    assert {"job_id", "directory", "is_alive", "hosts", "used_bytes", "slots"} <= set(job)
    assert [slot["state"] for slot in job["slots"]] == ["complete", "complete", "damaged", "complete"]
    assert "truncated" in job["slots"][2]["reason"]
    assert job["slots"][1]["step"] == 2
    assert job["slots"][1]["data_bytes"] == 4 * 16 * 4 + 8 * 2
    assert job["slots"][1]["is_newest_covered"]


def test_ls_without_jobs_says_so(run: Run, root: Path) -> None:
    assert run("ls") == (0, f"no snapshots in {root}\n", "")


def test_verify_of_sound_copies_says_which_hosts_cover_what(run: Run, pair: Pair) -> None:
    capture_step(pair[0], 3)
    status, out, _ = run("verify")
    assert status == 0
    assert "all copies agree" in out
    found = json.loads(run("verify", "job", "--json")[1])
    assert found["is_sound"]
    assert [(s["step"], s["is_covered"], s["hosts"]) for s in found["snapshots"]] == [
        (3, False, ["s0h0"]),
        (2, True, ["s0h0", "s1h0"]),
        (1, False, ["s1h0"]),
    ]
    assert found["snapshots"][0]["missing"] == [[SPLIT, [[4, 8], [0, 16]]]]
    assert found["damages"] == found["disagreements"] == found["overwritten"] == []


def test_verify_names_the_damaged_array_box_host_and_step_and_exits_with_1(run: Run, pair: Pair) -> None:
    damage(pair[1], "slot1", two())
    status, out, _ = run("verify")
    assert status == 1
    assert f"damaged: s1h0/slot1: {SPLIT} [4:8, 0:16] of step 2: its bytes do not match" in " ".join(
        out.split()
    )
    assert f"no: lacks {SPLIT} [4:8, 0:16]" in " ".join(out.split())
    (pair[0].directory / "slot0").write_bytes(bytes(10))
    status, out, _ = run("verify", "--json")
    assert status == 1
    reasons = [(d["host"], d["slot"], d["path"]) for d in json.loads(out)["damages"]]
    assert reasons == [("s0h0", "slot0", None), ("s1h0", "slot1", SPLIT)]


def test_verify_finds_intact_copies_that_differ_and_names_the_odd_one_of_three(
    run: Run, pair: Pair, root: Path
) -> None:
    capture_step(pair[0], 3)
    capture_step(pair[1], 3, value=4)
    status, out, _ = run("verify", "--json")
    (found,) = [d for d in json.loads(out)["disagreements"] if d["step"] == 3]
    assert status == 1
    assert (found["path"], found["suspects"]) == (WHOLE, [])
    assert sorted(found["hosts_by_checksum"].values()) == [["s0h0"], ["s1h0"]]
    third = make_arena(root, HostId(1, 1))
    capture_step(third, 3, static=static_of(HostId(0)))
    status, out, _ = run("verify")
    assert status == 1
    assert "most likely wrong: s1h0" in out
    third.close()


def test_read_lists_arrays_and_shows_one(run: Run, pair: Pair) -> None:
    status, out, _ = run("read")
    assert status == 0
    assert "step 2 of generation 1, 3 arrays" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith((" [", " ."))}
    assert set(rows) == {SPLIT, WHOLE, EMPTY}
    assert "(8, 16)" in rows[SPLIT]
    assert "(data, -)" in rows[SPLIT]
    assert "512" in rows[SPLIT]
    status, out, _ = run("read", "job", SPLIT, "--step", "1")
    assert status == 0
    assert "min 1, max 1, mean 1" in out
    assert json.loads(run("read", "job", "--json")[1])["arrays"][0]["nbytes"] == 512
    shown = json.loads(run("read", "job", WHOLE, "--json")[1])
    assert (shown["step"], shown["mean"], shown["dtype"]) == (2, 2.0, "bfloat16")
    assert json.loads(run("read", WHOLE, "--json")[1]) == shown  # of the only live job


def test_read_saves_an_array_that_numpy_reads_again(run: Run, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "w.npy"
    assert run("read", "job", SPLIT, "--out", str(file))[0] == 0
    assert (np.load(file) == np.full((8, 16), 2, np.float32)).all()
    assert run("read", "job", WHOLE, "--out", str(file))[0] == 0
    assert (np.load(file).view(ml_dtypes.bfloat16) == 2).all()
    assert run("read", "job", WHOLE, "--out", str(file), "--as", "float32")[0] == 0
    assert np.load(file).dtype == np.float32
    assert [path.name for path in tmp_path.iterdir()] == ["w.npy"]


def test_read_refuses_what_it_cannot_do_with_status_2(run: Run, pair: Pair, tmp_path: Path) -> None:
    for args, text in [
        (("read", "nobody"), "Start one with `elastic demo`"),
        (("read", "job", "w"), "the state has no array 'w'"),
        (("read", "job", SPLIT, "--step", "9"), "step 9 is not held, only 1, 2"),
        (("read", "job", "--out", "x.npy"), "need the PATH of an array"),
        (("read", "job", SPLIT, "--out", str(tmp_path / "no" / "x.npy")), "cannot write"),
        (("read", "job", SPLIT, "--out", str(tmp_path / "x.npy"), "--as", "cheese"), "cannot be converted"),
        (("read", str(tmp_path)), "holds no job"),
        (("read", "job", "--bogus"), "No such option"),
    ]:
        status, out, err = run(*args)
        assert (status, out) == (2, ""), args
        assert text in err
        assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_read_of_a_damaged_array_fails_naming_its_box(run: Run, pair: Pair) -> None:
    damage(pair[1], "slot1", two())
    status, _, err = run("read", "job", SPLIT)
    assert status == 1
    assert f"no surviving copy of {SPLIT!r}, box [4:8, 0:16] at step 2" in err


def test_gc_says_what_would_go_and_removes_it_only_without_dry_run(run: Run, pair: Pair, root: Path) -> None:
    make_arena(root, A, 7, job_id="old").close()
    status, out, _ = run("gc", "--dry-run")
    assert status == 0
    assert str(root / "elastic-old" / "s0h0") in out
    assert "elastic-job" not in out
    assert "would remove 2 directories" in out
    assert (root / "elastic-old").exists()
    expected = json.loads(run("gc", "--dry-run", "--json")[1])
    removed = json.loads(run("gc", "--json")[1])
    assert removed == expected | {"dry_run": False}
    assert sorted(path.name for path in root.iterdir()) == ["elastic-job"]


def test_help_and_version_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, text in [
        (["--version"], "elastic, version "),
        (["snapshot", "--help"], "verify"),
        (["snapshot", "read", "--help"], "ml_dtypes"),
        (["snapshot", "verify", "--help"], "Exit status 1"),
    ]:
        monkeypatch.setattr(sys, "argv", ["elastic", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert text in capsys.readouterr().out


def test_summary_leaves_out_nan_and_knows_every_kind_of_number(tmp_path: Path) -> None:
    summary = summarise(np.array([1, np.nan, 3, np.nan], np.float32))
    assert (summary.num_nan, summary.min, summary.max, summary.mean) == (2, 1, 3, 2)
    assert summarise(np.zeros((0, 3))).mean is None
    assert summarise(np.full(3, np.nan)).min is None
    assert summarise(np.array([3 + 4j, 0])).max == 5
    assert summarise(np.array([True, False])).mean == 0.5
    assert summarise(np.array([np.inf, -np.inf])).num_nan == 0
    assert summarise(np.float32(2.5).reshape(())).first_values == ("2.5",)
    for name in ("float8_e4m3fn", "int4", "uint2", "float4_e2m1fn", "bfloat16"):
        values = np.array([1, 0, 1], np.dtype(name))
        assert summarise(values).max == 1
        save_array(values, tmp_path / "x.npy")
        assert (np.load(tmp_path / "x.npy").view(np.dtype(name)) == values).all()
    assert summarise(np.array([b"ab"], "V2")).mean is None
