"""Which copies the job still stands on: a recovery may leave newer ones behind, and then goes another way."""

from __future__ import annotations

from collections.abc import Mapping


def is_on_lineage(step: int, generation: int, restored_steps: Mapping[int, int]) -> bool:
    """Tell whether the job still stands on a copy of `step` made in `generation`.

    `restored_steps` maps each generation to the step it was restored from. A copy is abandoned when a later
    generation was restored from an older step: the job went another way from there, and its shards must not
    be mixed with those of the new way, though the step has the same number.
    """
    return all(step <= restored for later, restored in restored_steps.items() if later > generation)
