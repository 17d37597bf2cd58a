"""The answer of `elastic plan`: memory, every loss of one slice, chosen losses of several, goodput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from elastic.plan_outcome import Clock, device_memory, gone, host_memory, lose, predicted_step, rejoin
from elastic.plan_report import SCHEMA, Assessment, Described, HostMemory, Outcome, Step
from elastic.plan_setting import Kept, Setting, sole_holders
from reshard.accelerators import FIGURES
from reshard.cost import goodput
from reshard.errors import UsageError
from reshard.layout import Layout

MAX_PLANNED_HOSTS = 64
"""On more hosts only the loss of the first and of the last slice is planned; the others are checked."""


def assess(
    setting: Setting, losses: Sequence[tuple[int, ...]], clock: Clock, *, every_slice: bool = False
) -> Assessment:
    """Return the whole answer; `losses` are sets of slices lost at once, without any each single slice.

    Every single loss is checked for state that goes with it. With `every_slice`, or on few hosts, each is
    planned too. `clock` gives seconds. Raises `UsageError` for a slice that the cluster does not have.
    """
    num_slices = setting.plan.cluster.slices
    for lost in losses:
        wrong = [index for index in lost if not 0 <= index < num_slices]
        if wrong:
            raise UsageError(f"the cluster has slices 0 to {num_slices - 1}, not {wrong[0]}")
    kept = setting.keep(setting.layout)
    sole = sole_holders(kept.all())
    singles = _singles(setting, sole, every_slice=every_slice)
    outcomes: list[Outcome] = []
    changed: Layout | None = None
    for lost in losses or [(index,) for index in singles]:
        if len(lost) == 1 and lost[0] in sole:
            outcomes.append(gone(lost, *sole[lost[0]]))
            continue
        outcome, layout = lose(setting, kept, lost, clock)
        outcomes.append(outcome)
        if changed is None and layout is not None:
            changed, away = layout, lost
    if changed is not None:
        outcomes.append(rejoin(setting, changed, away, clock))
    value, note = _goodput(setting, outcomes)
    return Assessment(
        schema=SCHEMA,
        title=setting.plan.title,
        described=_described(setting),
        host_memory=_fullest_host(setting, kept, outcomes),
        device_memory=device_memory(setting, setting.layout),
        step=predicted_step(setting, setting.layout),
        step_note=_step_note(setting),
        outcomes=tuple(outcomes),
        only_checked=() if losses else tuple(sorted(set(range(num_slices)) - set(singles))),
        goodput=value,
        goodput_note=note,
    )


def _singles(setting: Setting, sole: Iterable[int], *, every_slice: bool) -> list[int]:
    """Return the slices whose loss is planned: all, or a few and those that alone hold something."""
    num_slices = setting.plan.cluster.slices
    if every_slice or len(setting.hosts) <= MAX_PLANNED_HOSTS:
        return list(range(num_slices))
    return sorted({0, num_slices - 1, *sole})


def _fullest_host(setting: Setting, kept: Kept, outcomes: Sequence[Outcome]) -> HostMemory:
    """Return what a host of the whole cluster needs, with room for the largest fetch of any outcome."""
    loads = [
        found.move.busiest_target.nbytes
        for found in outcomes
        if found.move is not None and found.move.busiest_target is not None
    ]
    return replace(host_memory(setting, kept, setting.layout), stage_bytes=max(loads, default=0))


def _described(setting: Setting) -> Described:
    mesh = setting.layout.mesh
    figures = {name: setting.accelerator.figure(name) for name in FIGURES}
    return Described(
        accelerator=setting.accelerator.name,
        slices=setting.plan.cluster.slices,
        hosts=len(setting.hosts),
        devices=mesh.num_devices,
        mesh=mesh.sizes(),
        arrays=len(setting.layout.arrays),
        state_bytes=sum(array.nbytes for array in setting.layout.arrays),
        figures={name: None if figure is None else figure.value for name, figure in figures.items()},
        sources={name: figure.source for name, figure in figures.items() if figure is not None},
    )


def _step_note(setting: Setting) -> str:
    training = setting.plan.training
    if training.step_s is not None:
        return "from the plan file"
    if setting.step.step(setting.layout).seconds is None:
        return "give training.step_s, or tokens_per_row"
    return f"6 operations a parameter and token, at {training.utilisation:.0%} of the peak"


def _slowdown(setting: Setting, step: Step) -> float:
    whole = predicted_step(setting, setting.layout)
    return step.ratio if whole.seconds is None or step.seconds is None else step.seconds / whole.seconds


def _goodput(setting: Setting, outcomes: Sequence[Outcome]) -> tuple[float | None, str]:
    """Return the goodput with a loss every `recovery.mtbf_s`, and what is not in it."""
    recovery = setting.plan.recovery
    loss = next((found.move for found in outcomes if found.event == "loss" and found.move is not None), None)
    if recovery.mtbf_s is None or recovery.repair_s is None:
        return None, "give recovery.mtbf_s and recovery.repair_s"
    if loss is None:
        waits = any(found.verdict == "waits" for found in outcomes)
        return None, "after a loss the job waits" if waits else "no loss is survived"
    moves = [loss, *(found.move for found in outcomes if found.event == "return" and found.move is not None)]
    value = goodput(
        mtbf_s=recovery.mtbf_s,
        downtime_s=sum(move.downtime_s for move in moves),
        slow_s=recovery.repair_s,
        slow_ratio=max(_slowdown(setting, loss.step), 1.0),
        overhead=setting.plan.snapshots.stall,
    )
    unknown = [phase.name for phase in loss.phases if phase.seconds is None]
    return value, f"without {', '.join(unknown)}, which are not known" if unknown else ""
