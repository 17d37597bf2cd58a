"""The persistent tier's directory: what has a name there is whole, and no more is kept than asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from persist_helpers import facts_of, persist_tiny, tiny_array, tiny_layout, tiny_slots, write_tiny
from snapshot_helpers import start_python

from reshard.boxes import full_box
from reshard.errors import CorruptCopyError, MissingShardError, PersistentTierError, UsageError
from reshard.ids import HostId
from reshard.planner import make_plan
from snapshot.persist import (
    abort,
    begin,
    lock_root,
    next_epoch,
    prune,
)
from snapshot.persist_finish import finish
from snapshot.persist_format import FACTS_NAME, ITEM_NAME
from snapshot.persist_list import Persisted, list_persisted, read_root
from snapshot.persist_source import PersistentSource


def steps(persisted: tuple[Persisted, ...]) -> list[tuple[int, int]]:
    return [(one.step, one.generation) for one in persisted]


def holds(persisted: Persisted, step: int) -> bool:
    """Tell whether every array has the bytes of `step`."""
    source = PersistentSource(persisted.path)
    return all(
        source.read(array.path, full_box(array.shape)).tobytes() == tiny_array(array, step).tobytes()
        for array in tiny_layout().arrays
    )


def left_over(run: Path) -> list[str]:
    return sorted(path.name for area in ("staging", "dead") for path in (run / ".elastic" / area).iterdir())


@pytest.fixture
def run(root: Path) -> Path:
    path = root / "run"  # in memory: fsync costs nothing
    path.mkdir()
    return path


def test_a_finished_snapshot_is_listed_with_its_facts(run: Path, tmp_path: Path):
    made = persist_tiny(run, tmp_path, step=3, generation=2)
    assert list_persisted(run) == (made,)
    assert made.path == run / "3"
    assert (made.step, made.generation, made.position, made.layout) == (3, 2, 24, tiny_layout())
    assert made.facts.extra == {"seed": 7}
    assert holds(made, 3)
    assert left_over(run) == []


def test_its_holdings_feed_a_plan_for_other_hosts(run: Path, tmp_path: Path):
    made = persist_tiny(run, tmp_path)
    target = tiny_layout().resized([HostId(4)], 1)
    plan = make_plan(target, made.holdings(HostId(4)), step=1)
    assert plan.bytes_moved == 0
    assert plan.bytes_by_tier() == {"persistent": sum(array.nbytes for array in target.arrays)}


def test_a_state_of_zeros_is_stored_too(run: Path, tmp_path: Path):
    assert holds(persist_tiny(run, tmp_path, step=0), 0)


def test_what_is_not_finished_has_no_name(run: Path, tmp_path: Path):
    staging = write_tiny(run, tmp_path)
    assert list_persisted(run) == ()
    abort(run, staging)
    abort(run, staging)
    assert left_over(run) == []


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 3)])
def test_each_chunk_that_is_missing_or_short_is_found_and_writing_again_helps(
    run: Path, tmp_path: Path, damage: Callable[[Path], None]
):
    staging = write_tiny(run, tmp_path)
    chunks = [path for path in (staging / ITEM_NAME).rglob("c/**/*") if path.is_file()]
    chunks += [path for path in (staging / ITEM_NAME).rglob("c") if path.is_file()]
    assert len(chunks) == 7  # b, n, time; two of raw and of w
    for chunk in chunks:
        damage(chunk)
        with pytest.raises((MissingShardError, CorruptCopyError)) as caught:
            finish(run, staging, facts_of(tiny_layout()))
        assert str(caught.value.path)[2:3] == chunk.relative_to(staging / ITEM_NAME).parts[0][0]
        assert list_persisted(run) == ()
        assert write_tiny(run, tmp_path) == staging
    assert holds(finish(run, staging, facts_of(tiny_layout())), 1)


def test_writing_again_changes_no_byte(run: Path, tmp_path: Path):
    staging = write_tiny(run, tmp_path)
    before = {path: path.read_bytes() for path in staging.rglob("*") if path.is_file()}
    write_tiny(run, tmp_path)
    assert {path: path.read_bytes() for path in staging.rglob("*") if path.is_file()} == before


def test_staging_of_dead_attempts_goes_when_the_next_begins(run: Path):
    begin(run, 1, 1)
    begin(run, 2, 1)
    assert left_over(run) == ["1-g1-e1", "2-g1-e1"]  # 1 may just be finished
    begin(run, 3, 1)
    assert left_over(run) == ["2-g1-e1", "3-g1-e1"]
    begin(run, 2, 1)
    assert left_over(run) == ["2-g1-e1", "3-g1-e1"]
    begin(run, 2, 2)
    assert left_over(run) == ["2-g2-e1"]
    begin(run, 2, 2, epoch=2)
    assert left_over(run) == ["2-g2-e2"]


def test_snapshots_of_a_later_job_are_newer_whatever_their_generation(run: Path, tmp_path: Path):
    old = persist_tiny(run, tmp_path, step=9, generation=5)
    new = persist_tiny(run, tmp_path, step=4, generation=1, epoch=next_epoch(run))
    assert [one.path for one in list_persisted(run)] == [new.path, old.path]
    again = persist_tiny(run, tmp_path, step=9, generation=1, epoch=2)
    assert again.facts.epoch == 2
    assert prune(run, 1) == (new,)
    assert list_persisted(run) == (again,)


def test_prune_takes_away_what_the_job_has_left_behind(run: Path, tmp_path: Path):
    left = persist_tiny(run, tmp_path, step=9, generation=5)
    kept = persist_tiny(run, tmp_path, step=4, generation=5)
    new = persist_tiny(run, tmp_path, step=6, generation=1, epoch=2)
    assert prune(run, 3, {1: 4}) == (left,)
    assert list_persisted(run) == (new, kept)


def test_the_lock_files_of_killed_writers_do_not_get_in(run: Path, tmp_path: Path):
    staging = write_tiny(run, tmp_path)
    (staging / ITEM_NAME / "w.mu" / "c" / "0" / "0.__lock").write_bytes(b"half")
    made = finish(run, staging, facts_of(tiny_layout()))
    assert list(made.path.rglob("*__lock")) == []


def test_a_snapshot_of_the_same_step_stays_as_long_as_the_job_stands_on_it(run: Path, tmp_path: Path):
    old = persist_tiny(run, tmp_path, step=5, generation=1)
    assert persist_tiny(run, tmp_path, step=5, generation=1) == old
    assert persist_tiny(run, tmp_path, step=5, generation=2, restored_steps={2: 5}) == old
    new = persist_tiny(run, tmp_path, step=5, generation=3, restored_steps={2: 5, 3: 4})
    assert new.generation == 3
    assert persist_tiny(run, tmp_path, step=5, generation=2, restored_steps={3: 4}) == new
    assert list_persisted(run) == (new,)
    assert left_over(run) == []


def test_a_damaged_one_of_the_same_step_is_replaced_and_a_foreign_one_is_not(run: Path, tmp_path: Path):
    old = persist_tiny(run, tmp_path)
    (old.path / ITEM_NAME / FACTS_NAME).write_bytes(b"{}")
    assert [copy.name for copy in read_root(run).rejected] == ["1"]
    assert holds(persist_tiny(run, tmp_path), 1)
    (run / "2" / "params").mkdir(parents=True)
    with pytest.raises(UsageError, match="exists and is not ours"):
        persist_tiny(run, tmp_path, step=2)
    assert (run / "2" / "params").exists()
    assert prune(run, 1) == ()


def test_prune_keeps_the_newest_and_removes_what_the_job_has_left(run: Path, tmp_path: Path):
    for step, generation in ((1, 1), (2, 1), (9, 1), (3, 2), (4, 2)):
        persist_tiny(run, tmp_path, step, generation)
    assert steps(list_persisted(run)) == [(4, 2), (3, 2), (9, 1), (2, 1), (1, 1)]
    assert steps(prune(run, 3, {2: 2})) == [(9, 1), (1, 1)]
    assert steps(list_persisted(run)) == [(4, 2), (3, 2), (2, 1)]
    assert steps(prune(run, 1)) == [(3, 2), (2, 1)]
    assert sorted(path.name for path in run.iterdir()) == [".elastic", "4"]
    assert left_over(run) == []
    with pytest.raises(UsageError, match="at least 1"):
        prune(run, 0)


def test_a_directory_named_unlike_its_step_is_rejected(run: Path, tmp_path: Path):
    made = persist_tiny(run, tmp_path)
    made.path.rename(run / "7")
    assert "holds the snapshot of step 1" in read_root(run).rejected[0].reason
    assert list_persisted(run) == ()


def test_two_jobs_do_not_write_to_one_directory(tmp_path: Path):
    hold = "import sys, pathlib; from snapshot.persist import lock_root\n"
    hold += (
        "lock = lock_root(pathlib.Path(sys.argv[1]), 'first'); print('ready', flush=True); sys.stdin.read()"
    )
    child = start_python(hold, tmp_path / "run")
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(UsageError, match="job first writes its snapshots to"):
        lock_root(tmp_path / "run", "second", timeout_s=0)
    child.kill()
    child.communicate()
    lock_root(tmp_path / "run", "second").release()


def test_a_directory_that_cannot_be_used_is_a_clear_error(tmp_path: Path):
    with pytest.raises(PersistentTierError, match="No such file") as caught:
        lock_root(tmp_path / "no" / "run", "job")
    assert caught.value.reason == "missing"
    (tmp_path / "file").touch()
    with pytest.raises(PersistentTierError) as caught:
        begin(tmp_path / "file", 1, 1)
    assert caught.value.reason == "missing"
    with pytest.raises(PersistentTierError) as caught:
        finish(tmp_path, tmp_path / "no", facts_of(tiny_layout()))
    assert caught.value.reason == "missing"
    assert list_persisted(tmp_path / "nowhere") == ()


def test_boxes_that_share_a_chunk_are_refused_before_anything_is_written(run: Path, tmp_path: Path):
    from snapshot.contents import open_source
    from snapshot.persist_store import write_shards

    facts = facts_of(tiny_layout())
    source = open_source(tiny_slots(tmp_path).values(), 1)
    staging = begin(run, 1, 1)
    with pytest.raises(UsageError, match="not made of whole chunks"):
        write_shards(staging, facts.layout, facts.tree, [("['w'].mu", ((1, 3), (0, 3)))], source)
    source.close()
    assert [path for path in staging.rglob("*") if path.is_file()] == []
