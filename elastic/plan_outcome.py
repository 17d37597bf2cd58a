"""What one change of topology leads to: slices lost, or slices that come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from elastic.plan_report import DeviceMemory, HostMemory, Load, Missing, Move, Outcome, Step
from elastic.plan_setting import STEP, Kept, Setting, held_only_by
from reshard.boxes import Box
from reshard.choice import HORIZON_STEPS, LayoutChoice, choose_layout
from reshard.choice_figures import Limits
from reshard.cost import Phase, device_bytes, predict_restore, predict_transfer
from reshard.errors import MissingShardError
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.plan import Plan
from reshard.planner import make_plan
from reshard.stock import Stock
from snapshot.buddy_slots import NUM_SLOTS

Clock = Callable[[], float]


def lose(
    setting: Setting, kept: Kept, slices: tuple[int, ...], clock: Clock
) -> tuple[Outcome, Layout | None]:
    """Return what losing these slices, memory and all, leads to, and the layout that it goes on with, if any.

    `kept` is what the whole job keeps.
    """
    lost = {host for host in setting.hosts if host.slice_index in slices}
    survivors = [host for host in setting.hosts if host not in lost]
    num_left = setting.plan.cluster.slices - len(slices)
    if num_left < setting.plan.recovery.min_slices:
        if found := held_only_by(kept.all(), slices):  # then waiting brings nothing back
            return gone(slices, *found), None
        left = "1 slice is" if num_left == 1 else f"{num_left} slices are"
        reason = f"{left} left, the minimum is {setting.plan.recovery.min_slices}: it waits"
        return Outcome(event="loss", slices=slices, verdict="waits", reason=reason), None
    stock = kept.all().without(lost)
    choice = choose(setting, survivors, stock)
    if choice.layout is None:
        outcome = Outcome(event="loss", slices=slices, verdict="no layout", reason=choice.sentence())
    else:
        try:
            outcome = _moved(setting, "loss", slices, stock, choice.layout, clock)
        except MissingShardError as error:
            return gone(slices, error.path, error.box), None
    return replace(outcome, candidates=choice.candidates, explanation=choice.explain()), choice.layout


def gone(slices: tuple[int, ...], path: str, box: Box) -> Outcome:
    """Return the outcome when these slices alone held this box of this array."""
    error = MissingShardError(path, box, lost=[f"slice {index}" for index in slices])
    missing = Missing(path=path, box=box, message=str(error))
    return Outcome(event="loss", slices=slices, verdict="state is gone", missing=missing)


def rejoin(setting: Setting, layout: Layout, slices: tuple[int, ...], clock: Clock) -> Outcome:
    """Return what it takes when these slices come back, empty, to a job that went on in `layout`."""
    return _moved(setting, "return", slices, setting.keep(layout).all(), setting.layout, clock)


def choose(setting: Setting, hosts: Iterable[HostId], stock: Stock) -> LayoutChoice:
    """Return the layout for these hosts, and what else there was; `stock` is what they hold."""
    device_memory_bytes = setting.accelerator.value("device_memory_bytes")
    limits = Limits(
        device_memory_bytes=None if device_memory_bytes is None else int(device_memory_bytes),
        host_memory_bytes=None if setting.shm_bytes is None else int(setting.shm_bytes),
        state_factor=setting.plan.training.state_factor,
        replicas=setting.plan.snapshots.replicas,
        snapshot_slots=setting.plan.snapshots.slots,
    )
    step_s, repair_s = predicted_step(setting, setting.layout).seconds, setting.plan.recovery.repair_s
    horizon_steps = HORIZON_STEPS
    if step_s is not None and repair_s is not None:
        horizon_steps = max(1, round(repair_s / step_s))
    return choose_layout(
        setting.layout,
        hosts,
        setting.chips_per_host,
        holdings=stock,
        axes=(setting.plan.mesh.elastic,),
        limits=limits,
        allow=setting.plan.recovery.layouts,
        costs=setting.step,
        horizon_steps=horizon_steps,
    )


def host_memory(setting: Setting, kept: Kept, layout: Layout, *, stage_bytes: int = 0) -> HostMemory:
    """Return what snapshots of `layout` take of the fullest host's memory."""
    captured = max(kept.captured.bytes_by_host(layout).values(), default=0)
    snapshots = setting.plan.snapshots
    return HostMemory(
        slots=snapshots.slots,
        captured_bytes=captured,
        copies_slots=NUM_SLOTS,
        copies_bytes=max(kept.copies.bytes_by_host(layout).values(), default=0),
        stage_bytes=stage_bytes,
        persisted_bytes=captured if snapshots.persisted else 0,
        limit_bytes=setting.shm_bytes,
    )


def device_memory(setting: Setting, layout: Layout) -> DeviceMemory:
    """Return what the state takes of the fullest device's memory."""
    return DeviceMemory(
        state_bytes=device_bytes(layout),
        state_factor=setting.plan.training.state_factor,
        limit_bytes=setting.accelerator.value("device_memory_bytes"),
    )


def predicted_step(setting: Setting, layout: Layout) -> Step:
    """Return the predicted step on a layout."""
    cost = setting.step.step(layout)
    return Step(ratio=cost.ratio, seconds=cost.seconds, bound=cost.bound)


def _moved(
    setting: Setting,
    event: Literal["loss", "return"],
    slices: tuple[int, ...],
    stock: Stock,
    layout: Layout,
    clock: Clock,
) -> Outcome:
    hosts = [host for host in setting.hosts if host.slice_index in slices]
    began_s = clock()
    plan = make_plan(layout, stock, step=STEP, lost=hosts if event == "loss" else ())
    planned = Phase(name="plan", seconds=clock() - began_s, bound="measured here, on one core")
    sent, received = plan.bytes_sent(), plan.bytes_received()
    step = predicted_step(setting, layout)
    move = Move(
        bytes_moved=plan.bytes_moved,
        bytes_lower_bound=plan.bytes_lower_bound,
        bytes_local=plan.bytes_local,
        busiest_source=_busiest(sent),
        busiest_target=_busiest(received),
        phases=_phases(setting, event, planned, plan, layout, step),
        step=step,
        host_memory=host_memory(
            setting, setting.keep(layout), layout, stage_bytes=max(received.values(), default=0)
        ),
        device_memory=device_memory(setting, layout),
    )
    return Outcome(event=event, slices=slices, verdict="goes on", move=move)


def _phases(
    setting: Setting, event: str, planned: Phase, plan: Plan, layout: Layout, step: Step
) -> tuple[Phase, ...]:
    recovery = setting.plan.recovery
    received = plan.bytes_received()
    num_requests = 0
    if received and setting.rates.request_s:
        busiest = max(received, key=received.__getitem__)
        num_requests = sum(not transfer.is_local for transfer in plan.for_target(busiest))
    begin = [_given("detect", recovery.detect_s)] if event == "loss" else []
    return (
        *begin,
        _given("fence", recovery.fence_s),
        planned,
        predict_transfer(setting.rates, plan.bytes_sent(), received, num_requests=num_requests),
        predict_restore(setting.rates, device_bytes(layout)),
        _given("rebuild", recovery.rebuild_s),
        _replay(setting, event, step),
    )


def _given(name: str, seconds: float | None) -> Phase:
    missing = f"give recovery.{name}_s"
    return Phase(name=name, seconds=seconds, bound=missing if seconds is None else "from the plan file")


def _replay(setting: Setting, event: str, step: Step) -> Phase:
    """A loss costs half the interval between snapshots on average, and the step that was cut off."""
    every = setting.plan.snapshots.every_steps
    # A slice joins at a step boundary, right after a snapshot: nothing is run again, one step is to be run.
    num_steps = (every - 1) / 2 + 1 if event == "loss" else 1.0
    steps = "1 step" if num_steps == 1 else f"{num_steps:g} steps"
    if step.seconds is None:
        return Phase(name="replay", seconds=None, bound=f"{steps}; give training.step_s or tokens_per_row")
    return Phase(name="replay", seconds=num_steps * step.seconds, bound=f"{steps} of {step.seconds:.3g} s")


def _busiest(nbytes: dict[HostId, int]) -> Load | None:
    if not nbytes:
        return None
    host = max(nbytes, key=nbytes.__getitem__)
    return Load(host=str(host), nbytes=nbytes[host])
