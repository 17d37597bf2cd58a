"""Several threads copy: everything once, the right checksums, and no error lost."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from snapshot.checksum import checksum
from snapshot.copying import BLOCK_BYTES, MIN_BYTES_A_THREAD, CopyTeam, copy_and_hash, default_num_threads

MUCH = 64 * MIN_BYTES_A_THREAD


def test_every_item_is_done_once_and_by_all_threads() -> None:
    team, done = CopyTeam(4), Counter[int]()
    threads: set[int] = set()
    all_here = threading.Barrier(4)

    def work(item: int) -> None:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            all_here.wait(timeout=30)
        done[item] += 1

    for _ in range(3):
        threads.clear()
        team.for_each(work, range(100), MUCH)
        assert len(threads) == 4
    assert done == Counter(dict.fromkeys(range(100), 3))


@pytest.mark.parametrize(("num_threads", "nbytes"), [(1, MUCH), (4, 2 * MIN_BYTES_A_THREAD - 1)])
def test_small_work_stays_on_the_calling_thread(num_threads: int, nbytes: int) -> None:
    idents: set[int] = set()
    CopyTeam(num_threads).for_each(lambda _: idents.add(threading.get_ident()), range(20), nbytes)
    assert idents == {threading.get_ident()}


@pytest.mark.parametrize("fails_in_helper", [True, False])
def test_error_in_any_thread_is_raised_after_all_have_stopped(fails_in_helper: bool) -> None:
    caller, both_here, running = threading.get_ident(), threading.Barrier(2), Counter[str]()

    def work(item: int) -> None:
        running["began"] += 1
        both_here.wait(timeout=30)
        if (threading.get_ident() != caller) == fails_in_helper:
            raise RuntimeError(f"item {item}")
        running["ended"] += 1

    with pytest.raises(RuntimeError, match="item"):
        CopyTeam(2).for_each(work, range(2), MUCH)
    assert running == {"began": 2, "ended": 1}


def test_helpers_end_with_the_team() -> None:
    team = CopyTeam(3)
    threads: set[threading.Thread] = set()
    all_here = threading.Barrier(3)

    def work(_: int) -> None:
        threads.add(threading.current_thread())
        all_here.wait(timeout=30)

    team.for_each(work, range(3), MUCH)
    del team
    for thread in threads - {threading.current_thread()}:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_team_needs_a_thread() -> None:
    with pytest.raises(UsageError, match="num_threads=0"):
        CopyTeam(0)
    assert 1 <= default_num_threads() <= 4


@given(
    nbytes=st.one_of(
        st.integers(0, 300), st.sampled_from([BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 13])
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_copy_and_hash_is_a_copy_and_its_checksum(nbytes: int, seed: int) -> None:
    source = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    target = np.full(nbytes + 2, 7, np.uint8)
    assert copy_and_hash(target.ctypes.data + 1, source.ctypes.data, nbytes) == checksum(source)
    assert target.tobytes() == b"\7" + source.tobytes() + b"\7"
