"""Which captures are audits: the same ones on every slice, by the numbers of the steps alone."""

from __future__ import annotations


class AuditSchedule:
    """For one world that goes on after `newest_step` (-1: from the start).

    The first capture at or after each multiple of `every_steps` steps is an audit (0: none), and so is the
    first at or after an ordered step.
    """

    def __init__(self, every_steps: int, newest_step: int) -> None:
        self._every_steps = every_steps
        self._newest_step = newest_step

    def take_due(self, step: int, ordered_step: int | None) -> bool:
        """Tell whether the capture of `step` is an audit; to be called once for each capture, in order.

        An order that names a step of an earlier capture has come too late, and is nothing.
        """
        before, self._newest_step = self._newest_step, step
        every = self._every_steps
        is_turn = every > 0 and (step + 1) // every > (before + 1) // every
        return is_turn or (ordered_step is not None and before < ordered_step <= step)
