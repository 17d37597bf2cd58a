"""The timed program on a process's own devices: when it is its turn, and what it costs at most."""

from __future__ import annotations

import jax

from elastic.device_pace import FIRST_AFTER_S, MAX_PAUSE_S, SHARE, DevicePace


class StillClock:
    """Time that passes only when it is told to, and a little at each look."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.look_s = 0.001

    def __call__(self) -> float:
        self.now_s += self.look_s
        return self.now_s


def test_pace_is_measured_a_while_after_the_start_and_takes_a_thousandth_of_the_time() -> None:
    clock = StillClock()
    pace = DevicePace(jax.devices()[:2], clock)
    assert pace.measure_if_due() is None
    clock.now_s += FIRST_AFTER_S
    assert pace.measure_if_due() is not None
    ended_s = clock.now_s
    assert pace.measure_if_due() is None
    took_s = 3 * 0.001  # three runs, of one look at the clock each
    clock.now_s = ended_s + 0.9 * took_s / SHARE
    assert pace.measure_if_due() is None
    clock.now_s = ended_s + 1.1 * took_s / SHARE
    assert pace.measure_if_due() is not None


def test_slow_devices_are_measured_all_the_same() -> None:
    clock = StillClock()
    clock.look_s = 2.0
    pace = DevicePace(jax.devices()[:1], clock)
    clock.now_s += FIRST_AFTER_S
    assert pace.measure_if_due() == 2.0
    assert pace.measure_if_due() is None
    clock.now_s += MAX_PAUSE_S
    assert pace.measure_if_due() == 2.0


def test_pace_without_devices_is_never_measured() -> None:
    clock = StillClock()
    pace = DevicePace((), clock)
    clock.now_s += 1000 * FIRST_AFTER_S
    assert pace.measure_if_due() is None
