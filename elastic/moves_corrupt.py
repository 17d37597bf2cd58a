"""A slice whose copies of the state a majority finds wrong is thrown out; the others go on from before.

Its gradients went into every step since, so the next world starts at the newest captured step at which all
copies still agreed, if that is whole in memory (`elastic.choose`), and runs the steps after it again.
"""

from __future__ import annotations

from elastic import quarantine
from elastic.moves_fence import shrink
from elastic.turn import Turn


def throw_out(turn: Turn) -> bool:
    """Take the slices out that majorities have named in this world; whether there were any to take out.

    Never all of a world, and not once its loops have ended and only the final digest is waited for.
    """
    state = turn.state
    if state.config.on_corruption == "warn" or state.rehearsing or state.digesting or state.all_finished():
        return False
    convicted = {found.slice_index: found for found in reversed(state.copies.convicted)}
    wrong = tuple(index for index in state.world_slices if index in convicted)
    if not wrong or len(wrong) == len(state.world_slices):
        return False
    for index in wrong:
        found = convicted[index]
        cause = f"its copy of {found.path} of step {found.step} differs from the majority's"
        turn.change(last_cause=f"slice {index}: {cause}")
        members = state.config.members_of(index)
        turn.write_loss(members[0], cause, "checksum", turn.now.unix_s)
        quarantine.lost(turn, members[0], cause)
        for member in members:
            turn.end_worker(member, cause)
    shrink(turn, tuple(member for index in wrong for member in state.config.members_of(index)))
    return True
