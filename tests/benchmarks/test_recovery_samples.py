import itertools
import random

import pytest
from recovery_runs import fault_plan
from recovery_samples import (
    LossSample,
    joins,
    losses,
    summarise_joins,
    summarise_losses,
    summarise_peer,
    verdicts,
)

from elastic.records import StepCommitted, WorkerEvent, WorldFormed
from elastic.report_schema import PHASES, PhaseTimes, Recovery


def world(generation: int, slices: tuple[int, ...], mode: str = "in-place") -> WorldFormed:
    return WorldFormed(
        unix_s=0.0, generation=generation, slices=slices, mode=mode, restored_step=None, newest_committed=-1,
        lost=(), joined=(), bytes_moved=0, bytes_lower_bound=0, explanation="",
    )  # fmt: skip


def commits(generation: int, steps: range, began_s: float, step_s: float) -> list[StepCommitted]:
    return [
        StepCommitted(
            unix_s=began_s + number * step_s, generation=generation, slice_index=0, step=step, position=step,
            sample_ids=(), loss=None, step_s=step_s, stall_s=0.0, captured_bytes=1,
        )
        for number, step in enumerate(steps)
    ]  # fmt: skip


def recovery(generation: int, **changes: object) -> Recovery:
    fields: dict[str, object] = {
        "generation": generation, "cause": "slice 1: killed by SIGKILL", "lost_slices": (1,),
        "joined_slices": (), "slices_after": (0, 2), "mode": "in-place", "fault_unix_s": 10.0,
        "detected_unix_s": 10.1, "resumed_unix_s": 10.5, "mttd_s": 0.1, "mttr_s": 0.5,
        "phases_s": PhaseTimes(**dict.fromkeys(PHASES, 0.1)), "restored_step": 3, "resumed_step": 4,
        "replayed_steps": 0, "bytes_moved": 0, "bytes_lower_bound": 0, "source_tiers": {}, "explanation": "",
    }  # fmt: skip
    return Recovery(**(fields | changes))  # type: ignore[arg-type]


HISTORY = [
    world(2, (0, 1, 2), "first"),
    *commits(2, range(10), 0.0, 0.2),
    world(3, (0, 2)),
    *commits(3, range(10, 20), 10.5, 0.3),
]


def test_loss_counts_beside_the_step_of_the_world_before_it():
    (found,) = losses(HISTORY, [recovery(3)], 3)
    assert (found.signal, found.mode) == ("KILL", "in-place")
    assert found.step_s == pytest.approx(0.2)
    assert found.over_s == pytest.approx(0.3)


def test_loss_in_a_world_that_lacked_a_slice_or_of_two_at_once_does_not_count():
    assert losses(HISTORY, [recovery(3)], 4) == []
    assert losses(HISTORY, [recovery(3, lost_slices=(0, 1))], 3) == []


def test_join_tells_when_the_worker_was_ready_and_how_long_the_others_paused():
    events = [
        WorkerEvent(unix_s=11.0, generation=3, slice_index=1, state="started"),
        WorkerEvent(unix_s=12.5, generation=3, slice_index=1, state="ready"),
    ]
    grown = [world(4, (0, 1, 2), "scale-up"), *commits(4, range(20, 24), 14.0, 0.2)]
    joined = recovery(4, lost_slices=(), joined_slices=(1,), fault_unix_s=13.3)
    (found,) = joins([*HISTORY, *events, *grown], [joined])
    assert found.ready_s == pytest.approx(1.5)
    assert found.joined_s == pytest.approx(3.0)
    assert found.pause_s == pytest.approx(14.0 - 13.2)


def loss(over_s: float, mode: str = "in-place") -> LossSample:
    return LossSample(
        signal="KILL", mode=mode, step_s=0.2, mttd_s=0.05, mttr_s=0.2 + over_s, phases_s={"detect": 0.05}
    )


def test_verdicts_name_what_was_met_missed_and_not_measured():
    ours = {
        "KILL": summarise_losses([loss(0.2), loss(0.21), loss(3.0, "respawn")]),
        "STOP": summarise_losses([]),
        "join": summarise_joins([]),
    }
    peer = summarise_peer([{"recovery_s": 0.6, "step_s": 0.25}])
    told = verdicts(ours, peer)
    assert told["kill in place p50 <= one step + 0.25 s"] == "met"
    assert told["kill faster than torchft (0.5 s), p50"] == "met"
    assert told["in place >= 98 %"] == "missed"
    assert told["stop p50 <= one step + 1 s"] == "not measured"


def test_faults_of_a_run_leave_room_between_them_and_are_fixed_by_the_seed():
    faults, steps = fault_plan(random.Random(3), ["KILL", "STOP", "KILL"], 50)
    assert (faults, steps) == fault_plan(random.Random(3), ["KILL", "STOP", "KILL"], 50)
    at = [int(fault.partition("step=")[2]) for fault in faults]
    assert all(50 <= later - earlier <= 55 for earlier, later in itertools.pairwise(at))
    assert faults[1].startswith("stop:")
    assert steps > at[-1] + 50
