"""Which captures are audits: the same ones on every slice, as all capture the same steps."""

from __future__ import annotations


class AuditSchedule:
    """For one world: every `every_captures`-th capture is an audit (0: none), and so is the first one at or
    after an ordered step.
    """

    def __init__(self, every_captures: int) -> None:
        self._every_captures = every_captures
        self._num_captures = 0
        self._newest_step = -1

    def take_due(self, step: int, ordered_step: int | None) -> bool:
        """Tell whether the capture of `step` is an audit; to be called once for each capture, in order.

        An order that names a step of an earlier capture has come too late, and is nothing.
        """
        before, self._newest_step = self._newest_step, step
        self._num_captures += 1
        is_turn = self._every_captures > 0 and self._num_captures % self._every_captures == 0
        return is_turn or (ordered_step is not None and before < ordered_step <= step)
