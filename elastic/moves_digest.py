"""Digests of whole states: of the snapshot a world is restored from, of what its devices hold then, and of
the final state. One host computes them, in a thread of its agent.
"""

from __future__ import annotations

from elastic.choose import Choice, choose_restore
from elastic.events import DigestDone, Phase
from elastic.moves_decide import digest
from elastic.records import RestoreChecked
from elastic.turn import Turn

_ONCE_REBUILT = (Phase.REPLAYING, Phase.RUNNING)


def check_restored(turn: Turn) -> None:
    """Have the digest of what the devices hold computed, to be compared with that of the snapshot."""
    state = turn.state
    if state.choice is None:
        return
    restored, _ = choose_restore(state.held_by_world(), {})
    if restored is not None and restored.step == state.choice.step:
        digest(turn, restored, "restored")


def final_choice(turn: Turn) -> Choice | None:
    """The snapshot of the state after the last step, None where no such one is whole."""
    state = turn.state
    choice, _ = choose_restore(state.held_by_world(), dict(state.restored_steps), state.copies.named)
    return choice if choice is not None and choice.step == state.finished_step else None


def ask_again(turn: Turn, index: int) -> None:
    """A new agent is in the place of one that may have been computing a digest, which is gone with it."""
    state = turn.state
    if state.phase not in _ONCE_REBUILT or not state.world or state.world[0] != index:
        return
    if state.choice is not None and state.captured_digest is None:
        digest(turn, state.choice, "captured")
    if state.choice is not None and state.restored_digest is None:
        check_restored(turn)
    if state.digesting and state.final_digest is None:
        final = final_choice(turn)
        if final is not None:
            digest(turn, final, "final")


def note(turn: Turn, event: DigestDone) -> None:
    """Take in a digest; write the comparison down once both of a restore are there."""
    if event.purpose == "final":
        turn.change(final_digest=event.digest)
        return
    found = (event.generation, event.step, event.digest)
    if event.purpose == "captured":
        turn.change(captured_digest=found)
    else:
        turn.change(restored_digest=found)
    captured, restored = turn.state.captured_digest, turn.state.restored_digest
    if captured and restored and captured[:2] == restored[:2] and captured[2] and restored[2]:
        turn.write(
            RestoreChecked(
                unix_s=turn.now.unix_s,
                generation=event.generation,
                step=event.step,
                captured_digest=captured[2],
                restored_digest=restored[2],
            )
        )
