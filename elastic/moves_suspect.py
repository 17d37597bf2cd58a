"""A step failed: a loss that explains it, sick devices, or the script's own fault."""

from __future__ import annotations

from elastic.events import Phase, StepFailed
from elastic.kept_runtime import refuses
from elastic.moves_end import fail
from elastic.moves_fence import fence, shrink
from elastic.turn import Turn


def suspect(turn: Turn, event: StepFailed) -> None:
    """A step failed: if somebody is known to be gone that explains it, else wait for the detectors."""
    error = f"{turn.state.config.name(event.member)}: {event.error}"
    if refuses(turn, event):
        fence(turn, f"the kept runtime does not serve: {error}")
        return
    turn.change(suspect_error=error, unprobed=frozenset())
    turn.enter(Phase.SUSPECT, error, within_s=turn.state.config.timing.suspect_s)
    hear(turn, event)


def hear(turn: Turn, event: StepFailed) -> None:
    """A host whose own devices do not work is what was lost; the others' are well."""
    index, pid = event.member, turn.state.member(event.member).worker_pid
    if event.devices is None:
        turn.change(unprobed=turn.state.unprobed | {index})
    else:
        turn.change(unprobed=turn.state.unprobed - {index})
        turn.write_worker(index, "probed", pid, event.devices or "its devices are well")
    if event.devices and index in turn.state.world:
        cause = f"its devices do not work: {event.devices}"
        turn.change(last_cause=f"{turn.state.config.name(index)}: {cause}")
        turn.write_loss(index, cause, "device-probe", turn.now.unix_s)
        turn.end_worker(index, cause)
    advance_suspect(turn)


def advance_suspect(turn: Turn) -> None:
    """A loss explains the failure; without one, try once more from the snapshot, then stop."""
    state = turn.state
    if lost := turn.lost_members():
        shrink(turn, lost)
    elif turn.is_late() and not _is_probing(turn):
        step, error = state.newest_committed, state.suspect_error
        if state.unexplained_at == step:
            fail(turn, f"the step after {step} failed twice on healthy slices: {error}")
            return
        turn.change(unexplained_at=step)
        fence(turn, "no loss explains the failed step: once more from the snapshot")


def _is_probing(turn: Turn) -> bool:
    """Whether a probe of a host's devices may still end."""
    state = turn.state
    assert state.deadline_s is not None
    return bool(state.unprobed) and not turn.is_past(state.deadline_s + state.config.timing.probe_s)
