"""A slice that is slower than the others for a while is told, with its factor; noise never is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from straggler_records import committed, formed

from elastic.records import Record, StragglerOver, StragglerSeen
from elastic.stragglers import StragglerRule, StragglerWatch

WORLD = (0, 1, 2)


def feed(
    watch: StragglerWatch,
    num_steps: int,
    host_s: dict[int, float] | None = None,
    device_s: dict[int, float] | None = None,
    *,
    first: int = 0,
    world: tuple[int, ...] = WORLD,
    noise: random.Random | None = None,
    sigma: float = 0.25,
) -> list[Record]:
    """What the watch tells of so many steps; a time is that of each slice, or 2 ms (0.5 ms on devices)."""
    told: list[Record] = []
    for step in range(first, first + num_steps):
        for index in world:
            times = [(host_s or {}).get(index, 0.002), (device_s or {}).get(index, 0.0005)]
            if noise is not None:
                times = [one * noise.lognormvariate(0.0, sigma) for one in times]
            record = committed(step, index)
            told += watch.hear(
                replace(record, host_s=times[0], device_s=times[1] if step % 4 == 3 else None, step_s=0.06)
            )
    return told


def watching(**rule: float) -> StragglerWatch:
    watch = StragglerWatch(rule=StragglerRule(**rule))
    watch.hear(formed(1, WORLD))
    return watch


@pytest.mark.parametrize("slow", WORLD)
def test_slice_with_slow_input_is_told_once_with_its_factor_and_when_it_is_over(slow: int) -> None:
    watch = watching()
    (seen,) = feed(watch, 160, {slow: 0.05})
    assert isinstance(seen, StragglerSeen)
    assert (seen.slice_index, seen.where, seen.step, seen.factor) == (slow, "input", 63, 25.0)
    assert (seen.own_s, seen.others_s) == (0.05, 0.002)
    assert list(watch.seen) == [("input", slow)]
    (over,) = feed(watch, 160, first=160)
    assert isinstance(over, StragglerOver)
    assert (over.slice_index, over.where, over.step) == (slow, "input", 223)
    assert watch.seen == {}


@pytest.mark.parametrize("slow", WORLD)
def test_slice_with_slow_devices_is_told(slow: int) -> None:
    (seen,) = feed(watching(), 60, device_s={slow: 0.001})
    assert isinstance(seen, StragglerSeen)
    assert (seen.slice_index, seen.where, seen.factor) == (slow, "device", 2.0)


def test_one_of_two_slices_is_told_by_the_other() -> None:
    watch = StragglerWatch()
    watch.hear(formed(1, (0, 1)))
    assert [one.slice_index for one in feed(watch, 80, {1: 0.05}, world=(0, 1))] == [1]


def test_input_that_costs_little_of_a_step_is_not_told_whatever_its_factor() -> None:
    assert feed(watching(), 400, {1: 0.0025}) == []
    assert feed(watching(), 400, dict.fromkeys(WORLD, 1e-6) | {1: 0.005}) == []


def test_a_slow_stretch_shorter_than_the_windows_is_not_told() -> None:
    watch = watching()
    assert feed(watch, 48, {1: 0.05}) == []
    assert feed(watch, 320, first=48) == []


def test_all_slow_alike_is_no_straggler() -> None:
    assert feed(watching(), 400, dict.fromkeys(WORLD, 0.05), dict.fromkeys(WORLD, 0.01)) == []


def test_a_slice_alone_is_compared_with_nobody() -> None:
    watch = StragglerWatch()
    watch.hear(formed(1, (2,)))
    assert feed(watch, 100, {2: 1.0}, world=(2,)) == []


def test_a_new_world_begins_anew_and_ends_what_was_told() -> None:
    watch = watching()
    feed(watch, 160, {1: 0.05})
    (over,) = watch.hear(formed(2, (0, 2)))
    assert isinstance(over, StragglerOver)
    assert watch.seen == {}
    assert watch.hear(committed(161, 1)) == []  # of the world before


def test_steps_that_compile_do_not_count() -> None:
    watch = watching()
    for step in range(200):
        for index in WORLD:
            slow = replace(committed(step, index), host_s=9.0 if index else 0.001, compile_s=8.0)
            assert watch.hear(slow) == []


@given(st.integers(0, 2**32))
def test_noise_alone_is_never_told(seed: int) -> None:
    """Inputs and devices of equal slices, with a spread of a quarter either way."""
    assert feed(watching(), 320, {0: 0.03, 1: 0.03, 2: 0.03}, noise=random.Random(seed)) == []


@given(st.integers(0, 2**32), st.sampled_from(WORLD), st.floats(2.5, 50))
def test_a_slow_slice_in_noise_is_found_and_nobody_else(seed: int, slow: int, factor: float) -> None:
    noise = random.Random(seed)
    host_s = dict.fromkeys(WORLD, 0.03) | {slow: 0.03 * factor}
    told = feed(watching(), 160, host_s, noise=noise, sigma=0.2)
    assert [(one.slice_index, one.where) for one in told if isinstance(one, StragglerSeen)] == [
        (slow, "input")
    ]


def test_factor_must_be_more_than_one() -> None:
    with pytest.raises(Exception, match="must be more than 1, not 1"):
        StragglerRule(factor=1.0)
