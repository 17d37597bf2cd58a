"""A view shows a running job's state of one step, without copying, disturbing or outliving anything."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from snapshot_helpers import start_python
from view_helpers import EMPTY, SPLIT, WHOLE, A, B, capture_step, make_arena, static_of

import snapshot
from reshard.errors import MissingShardError, RetryLaterError, UsageError
from snapshot.arena import Arena
from snapshot.gc import collect
from snapshot.paths import nest, split_path

Pair = tuple[Arena, Arena]


@pytest.fixture
def pair(root: Path) -> Iterator[Pair]:
    arenas = make_arena(root, A, 1, 2), make_arena(root, B, 1, 2)
    yield arenas
    for arena in arenas:
        arena.close()


def open_descriptors(root: Path) -> list[str]:
    names = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(name for name in names if name.startswith(str(root)))


def test_view_merges_the_hosts_and_says_what_there_is(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root) as view:
        assert (view.step, view.generation) == (2, 1)
        assert view.paths() == (SPLIT, WHOLE, EMPTY) == tuple(view)
        assert view.layout.elastic_axis == "data"
        info = view.info(SPLIT)
        assert (info.shape, info.dtype, info.spec) == ((8, 16), "float32", (("data",), ()))
        assert (view[SPLIT] == 2).all()
        assert view[SPLIT].shape == (8, 16)
        assert view[WHOLE].dtype == ml_dtypes.bfloat16
        assert view[EMPTY].shape == (0, 3)
        assert view.is_current()
        view.check()
        assert list(view.tree()) == ["split", "whole", "empty"]
        assert view.tree()["whole"][0].shape == (8,)


def test_array_in_one_box_is_the_jobs_own_memory_and_cannot_be_written(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root) as view:
        whole = view[WHOLE]
        assert not whole.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            whole.flags.writeable = True
        assert (whole == 2).all()
        capture_step(pair[0], 3)
        assert view.is_current()
        capture_step(pair[0], 4)  # into the slot that is shown
        assert (whole == 4).all()
        assert not view.is_current()
        with pytest.raises(RetryLaterError, match="step 2 of job job was overwritten"):
            view.check()


def test_array_put_together_is_read_only_and_stays_as_it_was(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root) as view:
        split = view[SPLIT]
        assert not split.flags.writeable
        for arena in pair:
            capture_step(arena, 3)
            capture_step(arena, 4)
        assert (split == 2).all()
        with pytest.raises(RetryLaterError, match="overwritten"):
            view[SPLIT]
        view.refresh()
        assert (view.step, view.is_current()) == (4, True)
        assert (view[SPLIT] == 4).all()


def test_shards_name_host_and_box_over_the_jobs_memory(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root) as view:
        shards = view.shards(SPLIT)
        assert [(shard.host, shard.box) for shard in shards] == [
            (A, ((0, 4), (0, 16))),
            (B, ((4, 8), (0, 16))),
        ]
        assert not any(shard.elements.flags.writeable for shard in shards)
        assert all((shard.elements == 2).all() for shard in shards)
        assert [shard.host for shard in view.shards(WHOLE)] == [A, B]
        capture_step(pair[1], 3)
        capture_step(pair[1], 4)
        assert [float(shard.elements[0, 0]) for shard in shards] == [2, 4]


def test_view_takes_the_newest_step_that_all_hosts_together_have(root: Path, pair: Pair) -> None:
    capture_step(pair[0], 3)
    with snapshot.open("job", root=root) as view:
        assert view.step == 2
    with snapshot.open("job", root=root, partial=True) as view:
        assert view.step == 3
        assert (view[WHOLE] == 3).all()
        assert len(view.shards(SPLIT)) == 1
        with pytest.raises(MissingShardError, match=r"\[4:8, 0:16\] at step 3"):
            view[SPLIT]
    with pytest.raises(MissingShardError, match=r"partial=True"):
        snapshot.open("job", root=root, step=3)


def test_view_of_a_given_step_stays_there(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root, step=1) as view:
        assert view.step == 1
        assert (view.copy(SPLIT) == 1).all()
        for arena in pair:
            capture_step(arena, 3)
        with pytest.raises(RetryLaterError, match="step 1 of job job was overwritten"):
            view.copy(SPLIT)
        with pytest.raises(UsageError, match="step 1 is not held, only 2, 3"):
            view.refresh()


def test_generations_are_never_mixed(root: Path, pair: Pair) -> None:
    capture_step(pair[0], 3, generation=2, value=30)
    capture_step(pair[1], 3, generation=1, value=31)
    with snapshot.open("job", root=root) as view:
        assert (view.step, view.generation) == (2, 1)
    capture_step(pair[1], 3, generation=2, value=30)
    with snapshot.open("job", root=root) as view:
        assert (view.step, view.generation) == (3, 2)
        assert (view[SPLIT] == 30).all()


def test_copy_goes_on_to_the_newest_step_when_its_own_was_overwritten(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root) as view:
        for arena in pair:
            capture_step(arena, 3)
            capture_step(arena, 4)
        copies = view.copies()
        assert view.step == 4
        assert all((array == 4).all() for array in copies.values())
        copies[SPLIT][:] = 0  # private
        assert (view.copy(SPLIT) == 4).all()


def test_copy_passes_over_a_damaged_shard_for_that_of_another_host(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root) as view:
        shard = view.shards(WHOLE)[0].elements.tobytes()
        path = pair[0].directory / "slot1"
        data = path.read_bytes()
        offset = data.rindex(shard)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff")
        assert (view.copy(WHOLE) == 2).all()
        assert not (view[WHOLE] == 2).all()  # unverified, as said
        with (pair[1].directory / "slot1").open("r+b") as file:
            file.seek(offset)
            file.write(b"\xfe")
        with pytest.raises(MissingShardError, match="whole"):
            view.copy(WHOLE)


def test_copy_of_a_file_truncated_by_hand_is_an_error_and_no_sigbus(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root) as view:
        os.truncate(pair[0].directory / "slot1", 0)
        assert not view.is_current()
        assert (view.copy(WHOLE) == 2).all()  # from the other host
        assert (view.copy(SPLIT) == 1).all()  # of which that host has only a half
        assert view.step == 1
        assert [copy.name for copy in view.rejected] == ["s0h0/slot1"]
        assert "truncated" in view.rejected[0].reason


def test_view_does_not_keep_a_live_job_from_ending_nor_a_dead_one_from_being_collected(
    root: Path, pair: Pair
) -> None:
    live = snapshot.open("job", root=root)
    whole, split = live[WHOLE], live.shards(SPLIT)[1].elements
    pair[0].unlink()
    pair[1].close()
    with snapshot.open("job", root=root, partial=True) as other:
        assert len(collect(root).directories) == 2
        assert list(root.iterdir()) == []
        assert other.is_current()  # nothing will overwrite it any more
        assert (other.copy(WHOLE) == 2).all()
        with pytest.raises(UsageError, match="job job has ended"):
            other.refresh()
    live.close()
    assert (whole == 2).all()
    assert (split == 2).all()


def test_view_leaves_no_file_descriptor_mapping_or_file(root: Path, pair: Pair) -> None:
    before, files = open_descriptors(root), sorted(root.rglob("*"))
    for _ in range(3):
        view = snapshot.open("job", root=root)
        view.refresh()
        view.copies()
        view[WHOLE]
        view.close()
        view.close()
    with pytest.raises(UsageError, match="not held"):
        snapshot.open("job", root=root, step=9)
    assert open_descriptors(root) == before
    assert sorted(root.rglob("*")) == files
    assert str(root) not in "".join(
        line for line in Path("/proc/self/maps").read_text().splitlines() if " r--s " in line
    )
    with pytest.raises(UsageError, match="is closed"):
        view.copy(WHOLE)


def test_view_survives_that_its_slot_grows_and_says_when_it_is_overwritten(root: Path, pair: Pair) -> None:
    with snapshot.open("job", root=root, step=1) as view:
        whole = view[WHOLE]
        pair[0].reserve(1 << 20)
        assert (whole == 1).all()
        assert view.is_current()
        for step in (3, 4, 5):
            capture_step(pair[0], step)
        assert not view.is_current()
        assert (whole != 1).all()  # the memory of the slot, whatever is in it now


def test_only_live_job_is_found_without_a_name(root: Path) -> None:
    with pytest.raises(UsageError, match=r"no live job has snapshots in .* Start one with"):
        snapshot.open(root=root)
    make_arena(root, A, 1, job_id="dead").close()
    first = make_arena(root, A, 1, job_id="one")
    with snapshot.open(root=root, partial=True) as view:
        assert view.job.job_id == "one"
    second = make_arena(root, A, 1, job_id="two")
    with pytest.raises(UsageError, match=r"2 live jobs .*: one, two"):
        snapshot.open(root=root)
    first.close()
    second.close()


def test_run_directory_says_which_job_and_where(root: Path, pair: Pair, tmp_path: Path) -> None:
    job_file = tmp_path / "job.json"
    job_file.write_text(json.dumps({"job_id": "job", "shm_root": str(root), "adapter": "x"}))
    with snapshot.open(tmp_path) as view:
        assert view.step == 2
    with snapshot.open(root / "elastic-job") as view:
        assert view.step == 2
    job_file.write_text(json.dumps({"job_id": "over", "shm_root": str(root)}))
    with pytest.raises(UsageError, match=r"job over of .* has nothing in .*: it has ended"):
        snapshot.open(tmp_path)
    job_file.write_text("{")
    with pytest.raises(UsageError, match=r"job\.json cannot be read"):
        snapshot.open(tmp_path)
    with pytest.raises(UsageError, match="holds no job"):
        snapshot.open(root)
    with pytest.raises(UsageError, match="there is no run directory runs/x"):
        snapshot.open("runs/x", root=root)
    with pytest.raises(UsageError, match="no job of that id"):
        snapshot.open("nobody", root=root)


def test_job_without_a_snapshot_yet_says_to_wait(root: Path) -> None:
    arena = make_arena(root, A)
    with pytest.raises(RetryLaterError, match="no complete snapshot"):
        snapshot.open("job", root=root)
    arena.close()


def test_unknown_array_is_refused_with_names_that_are_like_it(root: Path, pair: Pair) -> None:
    with (
        snapshot.open("job", root=root) as view,
        pytest.raises(UsageError, match=r"no array 'split'.*\['split'\]"),
    ):
        view["split"]


WORKER = """
import sys
from pathlib import Path
from snapshot.arena import Arena
from view_helpers import A, B, capture_step, static_of
arenas = [Arena.attach("job", host, root=Path(sys.argv[1])) for host in (A, B)]
statics = [static_of(host, num_rows=4096) for host in (A, B)]
step = 3
while True:
    sum(range(200_000))  # the training step
    for arena, static in zip(arenas, statics):
        capture_step(arena, step, static=static)
    if step == 4:
        print("ready", flush=True)
    step += 1
"""


def test_copies_of_a_job_that_captures_all_the_time_are_of_one_step(root: Path) -> None:
    arenas = [make_arena(root, host) for host in (A, B)]
    for arena in arenas:
        arena.reserve(1 << 20)
    worker = start_python(WORKER, root)
    assert worker.stdout is not None
    assert worker.stdin is not None
    assert worker.stdout.readline() == "ready\n"
    steps, num_current, num_tries, rng = set(), 0, 0, random.Random(3)
    with snapshot.open("job", root=root) as view:
        while len(steps) < 20 or not num_current:
            num_tries += 1
            assert num_tries < 20_000
            try:
                view.refresh()
                whole = view[WHOLE]
                seen = whole[rng.randrange(4096)] * np.ones_like(whole)
                if (whole == seen).all() and view.is_current():  # read, then checked
                    num_current += 1
                    assert float(whole[0]) == float(ml_dtypes.bfloat16(view.step))
                copies = view.copies()
            except (RetryLaterError, MissingShardError):
                continue
            assert (copies[SPLIT] == view.step).all()
            assert (copies[WHOLE] == ml_dtypes.bfloat16(view.step)).all()
            steps.add(view.step)
    worker.kill()
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()
    for arena in arenas:
        arena.unlink()


def test_paths_of_pytrees_are_taken_apart_as_jax_writes_them() -> None:
    assert split_path("['params']['w.x'][0].mu") == ("params", "w.x", 0, "mu")
    assert split_path("[<flat index 3>]") == (3,)
    assert split_path("['it\\'s'][\"a]b\"]") == ("it's", "a]b")
    assert split_path("something else") == ("something else",)
    assert split_path("") == ("",)
    assert nest({"['a']['b']": 1, "['a'][0]": 2, "": 3}) == {"a": {"b": 1, 0: 2}, "": 3}
    assert nest({"['a']": 1, "['a']['b']": 2}) == {"a": 1, "['a']['b']": 2}


def test_static_of_both_halves_covers_alone(root: Path) -> None:
    arena = make_arena(root, A)
    capture_step(arena, 1, static=static_of(A, both_halves=True))
    with snapshot.open("job", root=root) as view:
        assert (view[SPLIT] == 1).all()
    arena.close()
