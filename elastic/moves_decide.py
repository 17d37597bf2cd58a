"""Deciding the next world: who goes on, from which snapshot, and what has to move."""

from __future__ import annotations

from typing import Literal

from elastic.choose import (
    Choice,
    choose_persisted,
    choose_restore,
    other_holders,
    plan_restore,
    plan_whole,
)
from elastic.events import ComputeDigest, Phase, Stage, StartService, WorkerState
from elastic.expected import expect_fresh
from elastic.kept_runtime import choose_runtime
from elastic.moves_end import describe_state_left, fail
from elastic.moves_persist import stage_persisted
from elastic.records import WorldFormed
from elastic.seats import filled, seated, tell_changes
from elastic.turn import Turn
from reshard.errors import ElasticError, UsageError
from reshard.layout import Layout
from reshard.plan import Plan


def decide(turn: Turn) -> None:
    """Choose who goes on, from which snapshot, and what has to move; wait where that is not possible yet."""
    turn.enter(Phase.PLANNING)
    state = turn.state
    ready = ready_slices(turn)
    if len(ready) < state.config.min_slices:
        wait(turn, f"{len(ready)} slices are left, at least {state.config.min_slices} are needed")
        return
    if not state.started and state.rehearsals_left:
        slices = ready[: state.config.num_slices - state.rehearsals_left]
        _form(turn, slices, "rehearsal", None, None, "a smaller world makes one step, for its programs")
        return
    choice, why = choose(turn)
    if choice is None and not _may_memory_come_back(turn):
        choice, why = _choose_persisted(turn, why)
    if choice is None and state.newest_committed >= 0:
        _miss(turn, why)
        return
    _form_next(turn, ready, choice, why)


def _form_next(turn: Turn, ready: tuple[int, ...], choice: Choice | None, why: str) -> None:
    """Fix the next world, of all that are ready or of as many as a layout takes, and let it be restored."""
    config, told = turn.state.config, dict(turn.state.layouts)
    hosts = tuple(config.host(member) for index in ready for member in config.members_of(index))
    plan = None
    try:
        if choice is None:
            target = expect_fresh(hosts, config.devices_per_host, told)
            target = None if target is None else target.in_order(hosts)
        else:
            target, plan = plan_restore(choice, hosts, config.devices_per_host, told)
    except UsageError as error:
        _wait_for_more(turn, ready, error.message)
        return
    except ElasticError as error:
        fail(turn, f"no plan for {len(ready)} slices: {error}")
        return
    slices = ready if target is None else target.slices
    if target is not None and target.why:
        why = f"{why}; {target.why}"
    if len(slices) < config.min_slices:
        _wait_for_more(turn, ready, f"{why}; at least {config.min_slices} slices are to take part")
        return
    _form(turn, slices, _mode(turn, slices), choice, plan, why)
    if choice is not None and target is not None and plan is not None:
        _stage(turn, choice, target.layout, plan)


def ready_slices(turn: Turn) -> tuple[int, ...]:
    """The slices that can be part of a world now, in rank order: of each host, the worker waits for one and
    the host has reported; and it has a seat or takes one.
    """
    members = map(turn.state.member, turn.state.members_with(WorkerState.READY))
    able = turn.state.whole(member.index for member in members if member.fenced and not member.leaving)
    return seated(turn.state.seats, able)


def choose(turn: Turn) -> tuple[Choice | None, str]:
    """The snapshot to go back to. What rehearsals left in memory does not count."""
    if not turn.state.started:
        return None, "the first world begins with a fresh state"
    copies = turn.state.copies
    since = None if turn.state.config.on_corruption == "warn" else copies.differed_since
    return choose_restore(turn.state.held(), dict(turn.state.restored_steps), copies.named, since)


def _may_memory_come_back(turn: Turn) -> bool:
    """Whether a host that is away may still hold what the others lack of a state in memory."""
    state = turn.state
    is_away = any(not member.attached for member in state.members)
    return state.started and is_away and not state.memory_given_up


def _choose_persisted(turn: Turn, why: str) -> tuple[Choice | None, str]:
    """The snapshot of the persistent tier to go back to, when no host's memory has the state."""
    choice = choose_persisted(turn.state.persisted, dict(turn.state.restored_steps))
    if choice is None:
        return None, why
    newest = turn.state.newest_committed
    found = f"step {choice.step} is in the persistent tier"
    if newest > choice.step:
        lost = f"step {newest}" if newest == choice.step + 1 else f"steps {choice.step + 1} to {newest}"
        found = f"{found}; {lost} were lost from memory ({why}) and are trained again"
    return choice, found


def wait(turn: Turn, why: str) -> None:
    """Wait for members, within one bound since the last world was formed."""
    until_s = turn.state.waiting_until_s
    if until_s is None:
        until_s = turn.now.mono_s + turn.state.config.timing.wait_s
    turn.enter(Phase.WAITING, why)
    turn.change(deadline_s=until_s, waiting_until_s=until_s, gather_until_s=None)
    turn.start_due(at_once=True)


def digest(turn: Turn, choice: Choice, purpose: Literal["captured", "restored", "final"]) -> None:
    """Have one host compute the digest of a whole state."""
    member = turn.state.world[0]
    if choice.is_persisted:
        layout, plan = choice.layout, Plan.empty(choice.step)
    else:
        layout, plan = plan_whole(choice.layout, choice.holdings, choice.step, turn.state.config.host(member))
    turn.send(
        ComputeDigest(
            member=member,
            generation=turn.state.generation,
            step=choice.step,
            of_generation=choice.generation,
            purpose=purpose,
            layout=layout,
            transfers=plan.transfers,
            is_persisted=choice.is_persisted,
        )
    )


def _miss(turn: Turn, why: str) -> None:
    """The hosts at hand cannot restore the state: never begin from scratch, wait for the others."""
    if all(member.attached for member in turn.state.members) and not turn.state.is_finishing_persist:
        fail(turn, describe_state_left(turn))
    else:
        turn.change(uncovered=why)
        wait(turn, f"the hosts at hand cannot restore the state: {why}")


def _wait_for_more(turn: Turn, ready: tuple[int, ...], why: str) -> None:
    """There is no layout for the slices that are ready: wait for others, if any can come, then give up."""
    slice_of = turn.state.config.slice_of
    missing = [member for member in turn.state.members if slice_of(member.index) not in ready]
    may_come = any(
        not member.attached or member.worker is WorkerState.STARTING or turn.may_start(member)
        for member in missing
    )
    if may_come and not turn.is_past(turn.state.waiting_until_s):
        wait(turn, why)
    else:
        fail(turn, f"{why}; {describe_state_left(turn)}")


def _mode(turn: Turn, slices: tuple[int, ...]) -> str:
    slice_of = turn.state.config.slice_of
    if not turn.state.started:
        return "first"
    if any(turn.state.member(index).fresh for index in turn.state.world if slice_of(index) in slices):
        return "respawn"
    return "scale-up" if set(turn.state.world_slices) < set(slices) else "in-place"


def _form(
    turn: Turn, slices: tuple[int, ...], mode: str, choice: Choice | None, plan: Plan | None, why: str
) -> None:
    """Fix the next world; start its runtime service."""
    state = turn.state
    before = set(state.world_slices) if state.started else set()
    idle = tuple(index for index in ready_slices(turn) if index not in slices)
    seats = filled(state.seats, {*slices, *idle})
    changes = tell_changes(state.seats, seats)
    if choose_runtime(turn, slices, mode, choice):
        turn.send(
            StartService(
                generation=state.generation, num_processes=len(slices) * state.config.hosts_per_slice
            )
        )
    else:
        why = f"{why}; in the runtime of generation {turn.state.runtime_generation}"
    _set_world(turn, slices, choice, is_real=mode != "rehearsal")
    turn.change(idle=idle, seats=seats)
    turn.write(
        WorldFormed(
            unix_s=turn.now.unix_s,
            generation=state.generation,
            slices=slices,
            mode=mode,
            restored_step=choice.step if choice else None,
            newest_committed=turn.state.newest_committed,
            lost=tuple(sorted(before - {*slices, *idle})),
            joined=tuple(sorted(set(slices) - before)) if before else (),
            bytes_moved=plan.bytes_moved if plan else 0,
            bytes_lower_bound=plan.bytes_lower_bound if plan else 0,
            explanation=f"{why}; {changes}" if changes else why,
        )
    )


def _set_world(turn: Turn, slices: tuple[int, ...], choice: Choice | None, *, is_real: bool) -> None:
    state = turn.state
    restored_step = choice.step if choice else -1
    newest = max(state.newest_committed, restored_step)  # a captured step was committed, whatever was heard
    turn.change(
        world=tuple(member for index in slices for member in state.config.members_of(index)),
        world_generation=state.generation,
        rehearsing=not is_real,
        started=state.started or is_real,
        choice=choice,
        newest_committed=newest,
        newest_before=newest,
        captured_digest=None,
        restored_digest=None,
        deadline_s=turn.now.mono_s + state.config.timing.stage_s,
        waiting_until_s=None,
        uncovered="",
        memory_given_up=False,
        reconvening=False,
    )


def _stage(turn: Turn, choice: Choice, target: Layout, plan: Plan) -> None:
    """Let the hosts of the forming world fetch what they lack of the snapshot."""
    turn.enter(Phase.RESTORING, within_s=turn.state.config.timing.stage_s)
    if choice.is_persisted:
        stage_persisted(turn, target)
        digest(turn, choice, "captured")
        return
    for index in turn.state.world:
        host = turn.state.config.host(index)
        remote = tuple(transfer for transfer in plan.for_target(host) if not transfer.is_local)
        turn.send(
            Stage(
                member=index,
                generation=turn.state.generation,
                step=choice.step,
                of_generation=choice.generation,
                position=choice.position,
                layout=choice.layout,
                transfers=remote,
                alternates=other_holders(remote, choice.holdings, turn.state.config.hosts_per_slice),
            )
        )
    digest(turn, choice, "captured")
