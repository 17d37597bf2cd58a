"""What losses lead to: bytes against a count by hand, refusals, memory, and what is not known."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_files import changed

from elastic.plan_assess import MAX_PLANNED_HOSTS, assess
from elastic.plan_file import parse_plan
from elastic.plan_outcome import lose, rejoin
from elastic.plan_report import Assessment, Outcome
from elastic.plan_setting import STEP, Setting, sole_holders
from reshard.errors import UsageError
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.stock import Stock

ONE_COPY = ("[training]", "[snapshots]\nreplicas = 1\n\n[training]")

SPREAD = ('spec = ["fsdp"]', 'spec = [["data", "fsdp"]]')


def clock() -> Callable[[], float]:
    """Each reading is a second after the one before."""
    return itertools.count().__next__


def setting(*changes: tuple[str, str]) -> Setting:
    return Setting.of(parse_plan(changed(*changes)))


def loss(found: Setting, *slices: int) -> Outcome:
    return lose(found, found.keep(found.layout), slices, clock())[0]


def answer(*changes: tuple[str, str], losses: tuple[tuple[int, ...], ...] = ()) -> Assessment:
    return assess(setting(*changes), losses, clock())


def seconds(outcome: Outcome) -> dict[str, float | None]:
    assert outcome.move is not None
    return {phase.name: phase.seconds for phase in outcome.move.phases}


def test_loss_moves_what_each_host_needs_and_did_not_capture() -> None:
    """6,400 bytes in four boxes; each host has two of them on its devices, and captures some."""
    found = setting()
    kept = found.keep(found.layout).captured.bytes_by_host(found.layout)
    outcome = loss(found, 3)
    assert outcome.verdict == "goes on"
    assert outcome.move is not None
    missing = sum(3200 - nbytes for host, nbytes in kept.items() if host.slice_index != 3)
    assert outcome.move.bytes_moved == outcome.move.bytes_lower_bound == missing
    assert outcome.move.bytes_local == 3 * 6400 - missing


def test_return_of_a_slice_moves_all_it_needs() -> None:
    found = setting()
    _, layout = lose(found, found.keep(found.layout), (3,), clock())
    assert layout is not None
    outcome = rejoin(found, layout, (3,), clock())
    assert outcome.move is not None
    assert outcome.move.bytes_moved >= 6400
    assert outcome.move.busiest_target is not None
    assert outcome.move.busiest_target.host in ("s3h0", "s3h1")
    assert outcome.move.busiest_target.nbytes == 3200


def test_phases_follow_the_formulae() -> None:
    """The busiest host over 1,000 bytes a second; 1,600 bytes to a device over 500; steps of 6 s × 4 / 3."""
    outcome = loss(setting(), 0)
    assert outcome.move is not None
    loads = [outcome.move.busiest_source, outcome.move.busiest_target]
    busiest = max(load.nbytes for load in loads if load is not None)
    found = seconds(outcome)
    assert found["transfer"] == pytest.approx(busiest / 1000)
    assert found["restore"] == pytest.approx(1600 / 500)
    assert found["plan"] == 1.0
    assert found["replay"] == pytest.approx(8.0)
    assert outcome.move.step.ratio == pytest.approx(4 / 3)


def test_requests_to_peers_cost_what_the_file_says() -> None:
    slow = ("hosts_per_slice = 2", "hosts_per_slice = 2\nrequest_s = 100.0")
    fast, with_requests = seconds(loss(setting(), 0))["transfer"], seconds(loss(setting(slow), 0))["transfer"]
    assert fast is not None
    assert with_requests is not None
    assert (with_requests - fast) % 100.0 == pytest.approx(0.0)
    assert with_requests > fast


def test_snapshots_at_intervals_are_replayed_by_half_on_average() -> None:
    interval = ("[training]", "[snapshots]\nevery_steps = 5\n\n[training]")
    assert seconds(loss(setting(interval), 0))["replay"] == pytest.approx(3 * 8.0)


def test_phases_that_nobody_told_are_not_guessed() -> None:
    outcome = loss(setting(("step_s = 6.0", ""), ("host_copy_bytes_s = 500.0", "")), 0)
    assert {name for name, value in seconds(outcome).items() if value is None} == {
        "detect",
        "fence",
        "restore",
        "rebuild",
        "replay",
    }
    assert outcome.move is not None
    assert outcome.move.step.seconds is None


def test_state_of_one_slice_alone_is_named_with_array_and_box() -> None:
    found = answer(ONE_COPY, SPREAD)
    assert [outcome.verdict for outcome in found.outcomes] == ["state is gone"] * 4
    for outcome in found.outcomes:
        assert outcome.missing is not None
        assert outcome.missing.path == "w"
        assert "'w', box [" in outcome.missing.message
        assert f"lost: slice {outcome.slices[0]}" in outcome.missing.message
    assert not found.is_sound


def test_loss_of_several_is_refused_exactly_when_they_alone_have_a_box() -> None:
    found = setting()
    kept = found.keep(found.layout)
    holders: dict[object, set[int]] = {}
    for group in kept.all().groups:
        for host, box in zip(group.host, group.box, strict=True):
            key = group.boxes[box].tobytes()
            holders.setdefault(key, set()).add(kept.all().hosts[host].slice_index)
    assert all(len(slices) == 2 for slices in holders.values())
    for pair in itertools.combinations(range(4), 2):
        is_gone = any(slices <= set(pair) for slices in holders.values())
        assert lose(found, kept, pair, clock())[0].verdict == ("state is gone" if is_gone else "goes on"), (
            pair
        )


def test_job_below_its_minimum_waits() -> None:
    minimum = ("[training]", "[recovery]\nmin_slices = 4\n\n[training]")
    outcome = loss(setting(minimum), 0)
    assert (outcome.verdict, outcome.move) == ("waits", None)
    assert "3 slices are left, the minimum is 4" in outcome.reason
    assert answer(minimum).is_sound


def test_losing_all_slices_takes_the_state_with_them() -> None:
    assert loss(setting(), 0, 1, 2, 3).verdict == "state is gone"


def test_state_that_is_gone_is_told_though_the_job_would_wait() -> None:
    """Two copies on four slices: pairs that alone have a box lose it, whatever the minimum is."""
    minimum = ("[training]", "[recovery]\nmin_slices = 4\n\n[training]")
    free, waiting = setting(), setting(minimum)
    verdicts = set()
    for pair in itertools.combinations(range(4), 2):
        is_gone = loss(free, *pair).verdict == "state is gone"
        verdicts.add(loss(waiting, *pair).verdict)
        assert loss(waiting, *pair).verdict == ("state is gone" if is_gone else "waits"), pair
    assert verdicts == {"state is gone", "waits"}


def test_goodput_of_a_job_that_waits_says_so() -> None:
    waiting = ("[training]", "[recovery]\nmin_slices = 4\nmtbf_s = 1e4\nrepair_s = 1.0\n\n[training]")
    found = answer(waiting)
    assert (found.goodput, found.goodput_note) == (None, "after a loss the job waits")


def test_layout_that_does_not_divide_is_answered_with_candidates() -> None:
    """16 rows over 4 × 4 parts divide; over 3 × 4 they do not, so the axis is given up or a slice idles."""
    outcome = loss(setting(SPREAD), 1)
    assert outcome.verdict == "goes on"
    assert {candidate.kind for candidate in outcome.candidates} == {
        "shrink",
        "replicate",
        "pad",
        "fewer-slices",
    }
    assert "does not divide into 12" in outcome.explanation


def test_no_layout_among_those_allowed_says_why() -> None:
    only_shrink = ("[training]", '[recovery]\nlayouts = ["shrink"]\n\n[training]')
    found = answer(SPREAD, only_shrink)
    losses = [outcome for outcome in found.outcomes if outcome.event == "loss"]
    assert {outcome.verdict for outcome in losses} == {"no layout"}
    assert "does not divide into 12" in losses[0].reason
    assert not found.is_sound


def test_host_memory_is_slots_of_all_that_is_kept_and_what_is_fetched() -> None:
    memory = answer(
        SPREAD, ("[training]", "[snapshots]\nslots = 3\npersisted = true\n\n[training]")
    ).host_memory
    assert memory.captured_bytes == 800  # 16 parts of 400 bytes on 8 hosts
    assert memory.copies_bytes == 800
    assert memory.persisted_bytes == 800
    assert memory.total_bytes == 3 * 800 + 2 * 800 + memory.stage_bytes + 800
    assert memory.stage_bytes > 0
    assert (memory.limit_bytes, memory.fits) == (0.5e6, True)


def test_memory_that_does_not_do_makes_the_answer_unsound() -> None:
    small_hosts = answer(("host_memory_bytes = 1e6", "host_memory_bytes = 1e3"))
    assert (small_hosts.host_memory.fits, small_hosts.is_sound) == (False, False)
    own_size = answer(("hosts_per_slice = 2", "hosts_per_slice = 2\nshm_bytes = 10.0"))
    assert own_size.host_memory.limit_bytes == 10.0
    small_devices = answer(("device_memory_bytes = 1e5", "device_memory_bytes = 1e3"))
    assert (small_devices.device_memory.fits, small_devices.is_sound) == (False, False)
    with_activations = answer(("step_s = 6.0", "step_s = 6.0\nstate_factor = 100.0"))
    assert (with_activations.device_memory.total_bytes, with_activations.is_sound) == (160_000, False)


def test_memory_that_is_not_known_is_not_judged() -> None:
    found = answer(("host_memory_bytes = 1e6", ""), ("device_memory_bytes = 1e5", ""))
    assert (found.host_memory.fits, found.device_memory.fits, found.is_sound) == (None, None, True)


def test_goodput_counts_both_changes_and_the_slow_steps_between() -> None:
    """Known phases of the loss and of the return, and 300 s of steps that take 4 / 3 as long."""
    found = answer(("[training]", "[recovery]\nmtbf_s = 1000.0\nrepair_s = 300.0\n\n[training]"))
    down_s = sum(o.move.downtime_s for o in (found.outcomes[0], found.outcomes[-1]) if o.move is not None)
    assert found.goodput == pytest.approx((1000 - down_s - 300 / 4) / 1000)
    assert found.goodput_note == "without detect, fence, rebuild, which are not known"


def test_goodput_leaves_out_what_snapshots_hold_up() -> None:
    losses = ("[training]", "[recovery]\nmtbf_s = 1000.0\nrepair_s = 300.0\n\n[training]")
    stall = ("[mesh]", "[snapshots]\nstall = 0.1\n\n[mesh]")
    without = answer(losses).goodput
    assert without is not None
    assert answer(losses, stall).goodput == pytest.approx(0.9 * without)


def test_goodput_is_only_told_when_losses_are() -> None:
    assert answer().goodput is None
    refused = answer(ONE_COPY, SPREAD, ("[mesh]", "[recovery]\nmtbf_s = 1.0\nrepair_s = 1.0\n\n[mesh]"))
    assert (refused.goodput, refused.goodput_note) == (None, "no loss is survived")


def test_each_slice_of_a_small_cluster_is_planned() -> None:
    found = answer()
    assert [(o.event, o.slices) for o in found.outcomes] == [
        ("loss", (0,)),
        ("loss", (1,)),
        ("loss", (2,)),
        ("loss", (3,)),
        ("return", (0,)),
    ]
    assert found.only_checked == ()


def test_few_slices_of_a_large_cluster_are_planned_and_all_are_checked() -> None:
    large = ("slices = 4", f"slices = {MAX_PLANNED_HOSTS // 2 + 1}")
    found = answer(large)
    assert [o.slices for o in found.outcomes if o.event == "loss"] == [(0,), (32,)]
    assert len(found.only_checked) == 31
    refused = answer(large, ONE_COPY)
    gone = {o.slices[0] for o in refused.outcomes if o.verdict == "state is gone"}
    assert gone == set(sole_holders(setting(large, ONE_COPY).keep(setting(large).layout).all()))
    assert gone


def test_asked_losses_are_planned_and_no_others() -> None:
    found = answer(losses=((0, 2), (1,)))
    assert [o.slices for o in found.outcomes if o.event == "loss"] == [(0, 2), (1,)]
    assert found.only_checked == ()
    with pytest.raises(UsageError, match="slices 0 to 3, not 4"):
        answer(losses=((4,),))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 3)), min_size=1))
def test_sole_holders_are_those_that_alone_hold_a_box(held: list[tuple[int, int, int]]) -> None:
    """Holdings of (slice, host, part) of one array in four parts."""
    stock = Stock.of_holdings(
        [
            Holding(host=HostId(s, h), step=STEP, path="w", box=((part, part + 1),), checksum=0, tier="shm")
            for s, h, part in held
        ],
        STEP,
    )
    slices_of = {part: {s for s, _, p in held if p == part} for _, _, part in held}
    expected = {min(slices) for slices in slices_of.values() if len(slices) == 1}
    found = sole_holders(stock)
    assert set(found) == expected
    for index, (path, box) in found.items():
        assert path == "w"
        assert slices_of[box[0][0]] == {index}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("chips_per_host = 2", "chips_per_host = 2.5", "whole number"),
        ("chips_per_host = 2", "", "Give chips_per_host"),
        ('accelerator = "custom"', 'accelerator = "tpu-v1"', "known are tpu-v5e"),
        ('batch_axes = ["data", "fsdp"]', 'batch_axes = ["tensor"]', "no axis 'tensor'"),
        ("[training]", "[recovery]\nmin_slices = 5\n\n[training]", "min_slices is 5, the cluster has 4"),
    ],
)
def test_setting_that_does_not_hold_together_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        setting((old, new))


def test_step_is_worked_out_from_operations_where_it_is_not_known() -> None:
    """6 × 1,600 parameters × 96 rows × 10 tokens over 16 chips of 1,000 operations a second, half used."""
    found = answer(
        ("step_s = 6.0", "tokens_per_row = 10\nutilisation = 0.5"),
        ("host_network_bytes_s = 1000.0", "host_network_bytes_s = 1e9\npeak_flops_s = 1000.0"),
    )
    assert found.step.seconds == pytest.approx(6 * 1600 * 960 / (16 * 1000 * 0.5))
    assert found.step_note == "6 operations a parameter and token, at 50% of the peak"
