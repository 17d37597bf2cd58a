"""An agent that is busy is alive; one that hangs is not."""

from __future__ import annotations

import threading

from elastic.agent_beat import Beat


def test_beats_while_the_deciding_thread_is_busy_and_stops_when_it_is_stuck() -> None:
    now_s, sent = [100.0], []
    beat = Beat(lambda: sent.append(now_s[0]), every_s=0.2, stuck_s=20.0, clock=lambda: now_s[0])
    for moment_s in (100.2, 119.9):
        now_s[0] = moment_s
        assert beat.beat()
    now_s[0] = 120.1
    assert not beat.beat()
    beat.turned()
    assert beat.beat()
    assert sent == [100.2, 119.9, 120.1]


def test_thread_beats_again_and_again_until_closed() -> None:
    many = threading.Semaphore(0)
    beat = Beat(many.release, every_s=0.001, stuck_s=60.0)
    beat.start()
    assert all(many.acquire(timeout=10.0) for _ in range(3))
    beat.close()
