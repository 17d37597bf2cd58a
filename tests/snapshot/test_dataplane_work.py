"""The queue of a fetch hands out every byte until it is there, whatever the sources do, and then ends."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import CorruptCopyError, MissingShardError, UsageError
from snapshot import dataplane_work
from snapshot.checksum import checksum
from snapshot.dataplane_parts import Goal, Part
from snapshot.dataplane_work import Work

BAD = 0xEE


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataplane_work, "PART_BYTES", 7)
        patch.setattr(dataplane_work, "BATCH_BYTES", 10)
        patch.setattr(dataplane_work, "WAIT_S", 0.001)
        patch.setattr(dataplane_work, "SLOW_S", 0.002)
        yield


class FakeSource:
    """Takes work as a source's thread does; writes right bytes or wrong ones, and breaks off at random."""

    def __init__(self, name: str, work: Work, truth: dict[str, bytes], seed: int, *, is_bad: bool) -> None:
        self.name, self.work, self.truth, self.is_bad = name, work, truth, is_bad
        self.random = random.Random(seed)
        self.was_cut = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while True:
            self.was_cut.clear()
            batch = self.work.take(self.name, self.was_cut.set)
            if not batch:
                return
            if all(self.fetch(part) for part in batch):
                self.work.release(self.name)
            else:
                self.work.give_back(self.name)

    def fetch(self, part: Part) -> bool:
        goal = part.goal
        if self.is_bad and goal.verify and self.random.random() < 0.5:
            self.work.refuse(part, CorruptCopyError(f"{self.name} knows that its copy is bad"))
            return True
        while part.left_bytes:
            if self.was_cut.is_set() or self.random.random() < 0.1:
                return False
            at = part.start + part.done_bytes
            num = min(self.random.randint(1, 4), part.left_bytes)
            right = self.truth[goal.path][at : at + num]
            goal.view[at : at + num] = bytes([BAD]) * num if self.is_bad else right
            part.done_bytes += num
            self.work.arrived(self.name, num)
        if self.random.random() < 0.05:
            self.work.put_back(part)  # as one that was asked too early
        elif self.work.finish(part, checksum(self.truth[goal.path])):
            self.work.judge(goal, part.round, checksum(goal.view))
        return True


@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    num_sources=st.integers(1, 3),
    bad=st.sets(st.integers(0, 2), max_size=2),
)
def test_every_byte_is_right_or_the_error_says_who_was_wrong(
    seed: int, sizes: list[int], num_sources: int, bad: set[int]
) -> None:
    rng = random.Random(seed)
    truth = {f"a{index}": bytes(rng.randrange(200) for _ in range(size)) for index, size in enumerate(sizes)}
    names = [f"s{index}" for index in range(num_sources)]
    goals = []
    for path, data in truth.items():
        live = rng.sample(names, rng.randint(1, num_sources))
        goals.append(Goal(path, ((0, len(data)),), memoryview(bytearray(len(data))), live))
    had = {goal.path: set(goal.live) for goal in goals}
    work = Work(goals, names)
    sources = [
        FakeSource(name, work, truth, rng.randrange(2**32), is_bad=index in bad)
        for index, name in enumerate(names)
    ]
    for source in sources:
        source.thread.start()
    assert work.over.wait(20)
    for source in sources:
        source.thread.join(10)
        assert not source.thread.is_alive()
    bad_names = {f"s{index}" for index in bad}
    if work.error is None:
        assert [goal.view.tobytes() for goal in goals] == list(truth.values())
        assert [goal.digest for goal in goals] == [checksum(data) for data in truth.values()]
        assert all(had[goal.path] - bad_names or not goal.view.nbytes for goal in goals)
    else:
        assert isinstance(work.error, CorruptCopyError)
        assert any(had[goal.path] <= bad_names for goal in goals)


def goal_of(num_bytes: int, live: list[str]) -> Goal:
    return Goal("w", ((0, num_bytes),), memoryview(bytearray(num_bytes)), live)


def test_largest_parts_go_first_and_a_source_takes_only_its_share() -> None:
    goals = [goal_of(size, ["a", "b"]) for size in (3, 40, 5)]
    work = Work(goals, ["a", "b"])
    batch = work.take("a", lambda: None)
    assert [part.stop - part.start for part in batch] == [7, 7]
    assert all(part.goal is goals[1] for part in batch)


def test_box_with_one_source_is_not_cut() -> None:
    goals = [goal_of(40, ["a"]), goal_of(0, ["a"])]
    (part,) = Work(goals, ["a"]).take("a", lambda: None)
    assert (part.start, part.stop) == (0, 40)
    assert goals[1].is_done


def test_last_source_of_a_box_that_fails_ends_it_with_its_error() -> None:
    work = Work([goal_of(4, ["a", "b"])], ["a", "b"])
    (part,) = work.take("a", lambda: None)
    work.refuse(part, MissingShardError("w", ((0, 4),), 1))
    assert not work.over.is_set()
    work.lose_source("b", UsageError("stale"))
    assert work.over.is_set()
    assert isinstance(work.error, MissingShardError)
    assert work.take("a", lambda: None) == []


def test_part_of_a_broken_connection_goes_on_at_its_byte_with_another_source() -> None:
    work = Work([goal_of(4, ["a", "b"])], ["a", "b"])
    (part,) = work.take("a", lambda: None)
    part.done_bytes = 3
    work.give_back("a")
    (again,) = work.take("b", lambda: None)
    assert (again, again.left_bytes) == (part, 1)


def test_part_that_did_not_match_is_fetched_whole_from_one_source() -> None:
    goal = goal_of(20, ["a", "b"])
    work = Work([goal], ["a", "b"])
    for part in work.take("a", lambda: None):
        part.done_bytes = part.stop - part.start
        assert not work.finish(part, 1)
    work.release("a")
    (rest,) = work.take("b", lambda: None)
    assert work.finish(rest, 2)  # each says another checksum of the same box
    work.release("b")
    work.judge(goal, goal.round, 1)
    (whole,) = work.take("b", lambda: None)
    assert (whole.start, whole.stop, goal.verify) == (0, 20, True)
