"""The right to command: when it is claimed, how long it lasts, and that it does not come back. On a clock of
the tests' own."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.arbiter import FencedError, Tenure, Watch, take_office
from elastic.file_arbiter import FileArbiter
from elastic.mandate import Mandate, wait_mandate

LEASE_S = 2.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class MemoryStore:
    """One record; `slow_s` passes on the clock within each renewal."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.record: Tenure | None = None
        self.slow_s = 0.0
        self.is_reachable = True
        self.dead: set[str] = set()

    def read(self) -> Tenure | None:
        self._reach()
        return self.record

    def claim(self, seen: Tenure | None, lease_s: float) -> Tenure | None:
        self._reach()
        if self.record != seen:
            return None
        epoch = 1 if seen is None else seen.epoch + 1
        self.record = Tenure(epoch=epoch, holder=f"holder-{epoch}", machine="m", lease_s=lease_s)
        return self.record

    def renew(self, held: Tenure) -> Tenure | None:
        self._reach()
        self.clock.now_s += self.slow_s
        if self.record is None or self.record.epoch != held.epoch:
            return None
        self.record = replace(held, beat=held.beat + 1)
        return self.record

    def is_holder_dead(self, seen: Tenure) -> bool:
        return seen.holder in self.dead

    def _reach(self) -> None:
        if not self.is_reachable:
            raise OSError("no such store")


def hold(store: MemoryStore, clock: Clock) -> Mandate:
    claimed = store.claim(store.record, LEASE_S)
    assert claimed is not None
    return Mandate(store, claimed, clock(), clock)


def test_lease_counts_from_before_the_renewal_began() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    mandate = hold(store, clock)
    clock.now_s, store.slow_s = 1.0, 0.9
    mandate.renew()
    clock.now_s = 2.95
    mandate.check()
    clock.now_s = 3.0
    assert not mandate.is_valid


def test_right_that_ran_out_does_not_come_back_by_renewing_late() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    mandate = hold(store, clock)
    clock.now_s = LEASE_S
    with pytest.raises(FencedError, match="could not be renewed within 2 s"):
        mandate.renew()
    assert store.record is not None
    assert store.record.beat == 0


def test_renewal_that_takes_longer_than_the_lease_ends_the_right() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    mandate = hold(store, clock)
    store.slow_s = LEASE_S
    with pytest.raises(FencedError):
        mandate.renew()


def test_holder_that_finds_a_higher_epoch_is_fenced_at_once() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    mandate = hold(store, clock)
    store.claim(store.record, LEASE_S)
    with pytest.raises(FencedError, match="epoch 1 is over: another coordinator has taken over"):
        mandate.renew()
    assert not mandate.is_valid


def test_store_out_of_reach_leaves_the_right_until_the_lease_is_over() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    mandate = hold(store, clock)
    store.is_reachable = False
    clock.now_s = 1.0
    mandate.renew()
    assert mandate.is_valid
    clock.now_s = 2.0
    with pytest.raises(FencedError):
        mandate.renew()


def test_claimant_waits_for_the_whole_lease_without_a_change() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    hold(store, clock)
    watch = Watch()
    assert take_office(store, watch, 100.0, LEASE_S, store.record) is None
    assert take_office(store, watch, 101.9, LEASE_S, store.record) is None
    assert store.record is not None
    store.renew(store.record)
    assert take_office(store, watch, 102.0, LEASE_S, store.record) is None
    assert take_office(store, watch, 103.9, LEASE_S, store.record) is None
    claimed = take_office(store, watch, 104.0, LEASE_S, store.record)
    assert claimed is not None
    assert claimed.epoch == 2


def test_claimant_does_not_wait_for_the_dead() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    hold(store, clock)
    store.dead.add("holder-1")
    assert take_office(store, Watch(), 0.0, LEASE_S, store.record) is not None


@given(
    renewals=st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)), max_size=6),
    looks=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40),
    skew_s=st.floats(-1e6, 1e6),
)
def test_nobody_claims_while_the_holder_may_command(
    renewals: list[tuple[float, float]], looks: list[float], skew_s: float
) -> None:
    """Renewals that take their time, looks at any moment, clocks that have nothing in common."""
    clock = Clock()
    store = MemoryStore(clock)
    mandate = hold(store, clock)
    watch = Watch()
    for renewal, look_s in zip(renewals + [(9.0, 0.0)] * len(looks), looks, strict=False):
        if mandate.is_valid:
            clock.now_s += renewal[0]
            store.slow_s = renewal[1]
            with_fence = pytest.raises(FencedError) if clock.now_s >= mandate._until_s else None
            if with_fence is not None:
                with with_fence:
                    mandate.renew()
            else:
                try:
                    mandate.renew()
                except FencedError:
                    assert not mandate.is_valid
        clock.now_s += look_s
        if take_office(store, watch, clock.now_s + skew_s, LEASE_S, store.record) is not None:
            assert not mandate.is_valid
            return


def test_stopped_renewing_is_told_once_from_the_thread_that_renews(tmp_path: Path) -> None:
    first = FileArbiter(tmp_path)
    mandate = wait_mandate(first, 0.3)
    told: list[str] = []
    lost = threading.Event()

    def on_lost(error: FencedError) -> None:
        told.append(error.message)
        lost.set()

    mandate.keep(on_lost)
    second = FileArbiter(tmp_path)
    while not lost.is_set():  # whatever the holder has renewed meanwhile
        second.claim(second.read(), 5.0)
    assert lost.wait(10.0)
    assert len(told) == 1
    assert not mandate.is_valid
