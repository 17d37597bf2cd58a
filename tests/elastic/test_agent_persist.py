"""An agent's share of the persistent tier, with real writer processes."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_arenas import GENERATION, capture_step, elements, layout_of_hosts, made_arenas

from elastic.agent_persist import Persister
from elastic.events import (
    ComputeDigest,
    FinishPersist,
    Persisted,
    PersistSettled,
    SharePersisted,
    StagePersisted,
)
from elastic.job import PersistSpec
from elastic.persistent_reads import digest_from_disk, find_persisted, stage_from_disk
from reshard.errors import CorruptCopyError, MissingShardError, UsageError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.arena import Arena
from snapshot.digest import state_digest
from snapshot.persist_tree import description_of

BOUND_S = 40.0


class Hosts:
    """Agents as far as the persistent tier is concerned."""

    def __init__(self, layout: Layout, arenas: dict[HostId, Arena], spec: PersistSpec) -> None:
        self.layout = layout
        self.arenas = arenas
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.persisters = {
            host: Persister(spec, "job", host.slice_index, 2, arena, self.told.put)
            for host, arena in arenas.items()
        }
        for persister in self.persisters.values():
            persister.describe(description_of([array.path for array in layout.arrays]))

    def captured(self, step: int) -> None:
        for host, arena in self.arenas.items():
            capture_step(arena, self.layout, step, 2)
            self.persisters[host].captured(GENERATION, step)

    def answers(self, number: int) -> list[Any]:
        return [self.told.get(timeout=BOUND_S) for _ in range(number)]

    def finish(self, step: int) -> Persisted:
        first = next(iter(self.persisters.values()))
        first.finish(FinishPersist(member=0, generation=GENERATION, step=step))
        answer = self.told.get(timeout=BOUND_S)
        assert isinstance(answer, Persisted)
        self.settled(step, failed=bool(answer.error))
        return answer

    def settled(self, step: int, *, failed: bool) -> None:
        for host, persister in self.persisters.items():
            persister.settled(
                PersistSettled(member=host.slice_index, generation=GENERATION, step=step, failed=failed)
            )


@contextlib.contextmanager
def running(directory: Path, num_slices: int = 2, **settings: Any) -> Iterator[Hosts]:
    spec = PersistSpec(directory=directory, **{"every_steps": 2, "keep": 2} | settings)
    layout = layout_of_hosts(num_slices)
    with made_arenas(layout, 2, 0) as arenas:
        hosts = Hosts(layout, arenas, spec)
        for persister in hosts.persisters.values():
            persister.captured(GENERATION, 0)
        try:
            yield hosts
        finally:
            for persister in hosts.persisters.values():
                persister.cancel()


def ok(step: int, num_slices: int = 2) -> set[SharePersisted]:
    return {SharePersisted(member=index, generation=GENERATION, step=step) for index in range(num_slices)}


@pytest.mark.parametrize(
    ("every", "captured", "expected"),
    [(3, range(9), [2, 5, 8]), (4, [0, 5, 6, 11, 30], [5, 11, 30]), (1, range(1, 4), [1, 2, 3])],
)
def test_first_capture_of_each_period_is_due(every: int, captured: Any, expected: list[int]) -> None:
    spec = PersistSpec(directory=Path("/x"), every_steps=every)
    steps = list(captured)
    before = [-1 if steps[0] == 0 else steps[0] - 1, *steps[:-1]]
    due = [step for step, previous in zip(steps, before, strict=True) if spec.is_due(step, previous)]
    assert due == expected


def test_shares_of_all_hosts_together_are_a_snapshot_that_reads_back(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        hosts.captured(1)
        assert set(hosts.answers(2)) == ok(1)
        done = hosts.finish(1)
        assert (done.step, done.error) == (1, "")
        assert done.snapshot is not None
        assert (done.snapshot.layout, done.snapshot.position) == (hosts.layout, 8)
        assert done.persisted_bytes == 5 + 36 * 4
        assert [found.step for found in find_persisted(tmp_path)] == [1]
        whole = [(a.path, a.dtype, a.shape, elements(a.path, 1).tobytes()) for a in hosts.layout.arrays]
        command = ComputeDigest(
            member=0,
            generation=9,
            step=1,
            of_generation=GENERATION,
            purpose="captured",
            layout=hosts.layout,
            transfers=(),
            is_persisted=True,
        )
        assert digest_from_disk(tmp_path, command) == state_digest(whole)


def test_boxes_of_another_layout_are_staged_from_disk(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        hosts.captured(1)
        hosts.answers(2)
        hosts.finish(1)
        box = ((2, 9), (0, 3))  # across what the two hosts wrote
        command = StagePersisted(
            member=0, generation=7, step=1, layout=hosts.layout, boxes=(("['w']", box),), position=8
        )
        arena = hosts.arenas[HostId(0)]
        assert stage_from_disk(arena, tmp_path, command) == 7 * 3 * 4
        source = arena.find_shards(1, 7)
        assert source.read("['w']", box).tobytes() == elements("['w']", 1)[2:9].tobytes()
        source.close()


def test_damaged_or_missing_snapshot_on_disk_is_refused_with_its_name(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        hosts.captured(1)
        hosts.answers(2)
        hosts.finish(1)
        command = StagePersisted(
            member=0, generation=7, step=1, layout=hosts.layout, boxes=(("['w']", ((0, 12), (0, 3))),)
        )
        files = (tmp_path / "1" / "default" / "w" / "c").rglob("0")
        chunk = next(path for path in files if path.is_file())
        data = bytearray(chunk.read_bytes())
        data[3] ^= 1
        chunk.write_bytes(data)
        with pytest.raises(CorruptCopyError, match=r"\['w'\]"):
            stage_from_disk(hosts.arenas[HostId(0)], tmp_path, command)
        chunk.unlink()
        with pytest.raises((MissingShardError, CorruptCopyError), match=r"\['w'\]"):
            stage_from_disk(hosts.arenas[HostId(0)], tmp_path, command)
        assert not hosts.arenas[HostId(0)].directory.joinpath("stage").exists()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        for step in (1, 3, 5):
            hosts.captured(step)
            assert set(hosts.answers(2)) == ok(step)
            assert hosts.finish(step).error == ""
        assert [found.step for found in find_persisted(tmp_path)] == [5, 3]


def test_last_captured_step_is_persisted_at_the_end_of_the_loop_once(tmp_path: Path) -> None:
    with running(tmp_path, every_steps=100) as hosts:
        for arena in hosts.arenas.values():
            capture_step(arena, hosts.layout, 1, 2)
        for persister in hosts.persisters.values():
            persister.captured(GENERATION, 1)
            persister.loop_ended()
            persister.loop_ended()
        assert set(hosts.answers(2)) == ok(1)
        assert hosts.told.empty()


def test_directory_that_cannot_be_written_is_an_error_of_the_share(tmp_path: Path) -> None:
    (tmp_path / "tier").write_text("a file")
    with running(tmp_path / "tier") as hosts:
        hosts.captured(1)
        for answer in hosts.answers(2):
            assert "tier" in answer.error
        assert not (hosts.arenas[HostId(0)].directory / "pinned").exists()


def test_snapshot_overwritten_before_it_could_be_copied_is_an_error_of_the_share(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        host = HostId(0)
        for step in (1, 2, 3):
            capture_step(hosts.arenas[host], hosts.layout, step, 2)
        hosts.persisters[host].captured(GENERATION, 1)
        (answer,) = hosts.answers(1)
        assert "overwritten before it could be copied" in answer.error


def test_world_given_up_tells_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        hosts.captured(1)
        shares = [persister._share for persister in hosts.persisters.values()]
        for persister in hosts.persisters.values():
            persister.cancel()
        for share in shares:
            assert share is not None
            share.thread.join(BOUND_S)
            assert not share.thread.is_alive()
        assert hosts.told.empty()
        assert find_persisted(tmp_path) == ()


def test_agent_that_wrote_no_share_cannot_finish(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        assert "has written no share" in hosts.finish(1).error


def test_step_that_is_due_before_the_last_is_settled_is_left_out_by_all(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        hosts.captured(1)
        assert set(hosts.answers(2)) == ok(1)  # written, but not put together yet
        hosts.captured(3)
        hosts.captured(4)
        for left_out in hosts.answers(2):
            assert (left_out.step, left_out.left_out) == (3, True)
            assert "step 1 was still being written" in left_out.error
        assert hosts.finish(1).error == ""
        hosts.captured(5)
        assert set(hosts.answers(2)) == ok(5)
        assert hosts.finish(5).error == ""
        assert [found.step for found in find_persisted(tmp_path)] == [5, 1]


def test_last_step_is_written_though_the_one_before_is_not_settled(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        hosts.captured(1)
        hosts.captured(3)
        for persister in hosts.persisters.values():
            persister.loop_ended()
        assert set(hosts.answers(4)) == ok(1) | ok(3)
        assert [hosts.finish(step).error for step in (1, 3)] == ["", ""]
        assert [found.step for found in find_persisted(tmp_path)] == [3, 1]


def test_share_of_a_snapshot_that_failed_elsewhere_is_given_up(tmp_path: Path) -> None:
    with running(tmp_path) as hosts:
        hosts.captured(1)
        hosts.settled(1, failed=True)
        for persister in hosts.persisters.values():
            assert persister._share is not None
            persister._share.thread.join(BOUND_S)
        hosts.captured(3)
        told = [answer for answer in hosts.answers(2) if answer.step == 3]
        while len(told) < 2:  # what was written of step 1 before the word came may be told first
            told += [answer for answer in hosts.answers(1) if answer.step == 3]
        assert set(told) == ok(3)


@pytest.mark.parametrize("settings", [{"every_steps": 0}, {"keep": 0}])
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        PersistSpec(directory=tmp_path, **settings)
