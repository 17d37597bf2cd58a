"""After which steps of a world the state is captured: decided alike by all its processes. Pure.

Every host has two slots, so hosts that captured different steps might have none in common. What is
decided here therefore depends only on what all processes know: the step, the cadence, and numbers they
have agreed on (`elastic.agreement`).
"""

from __future__ import annotations

from enum import StrEnum

from elastic.cadence import Cadence, EverySteps

REVIEW_STEPS = 16
"""After so many steps without a capture the interval is agreed on anew: steps may have become slower."""


class Decision(StrEnum):
    """What to do after a step: nothing, capture, or leave out a capture that is due but cannot keep up."""

    PASS = "pass"
    CAPTURE = "capture"
    SKIP = "skip"


class Pace:
    """Decides for one world. All processes must make the same calls with the same values.

    `captured_step` is the step the world was restored from and captured again (None: fresh).
    `needs_copies`: a capture may overwrite the older slot only when the newest snapshot is complete on every
    host, and its copies are where they belong. Where captures end with the step they are of, and nothing is
    copied, that is so without asking: the next step cannot end before all have begun it.
    """

    def __init__(
        self,
        cadence: Cadence,
        *,
        captured_step: int | None = None,
        needs_copies: bool = False,
    ) -> None:
        self.interval_steps = cadence.steps if isinstance(cadence, EverySteps) else 1
        self.captured_step = captured_step
        self._is_fixed = isinstance(cadence, EverySteps)
        self._needs_copies = needs_copies
        self._copied_step = -1

    @property
    def needs_agreement(self) -> bool:
        """Whether processes may differ in what they measure or wait for."""
        return not self._is_fixed or self._needs_copies

    @property
    def is_copied(self) -> bool:
        """Whether the older slot may be overwritten: every host's newest snapshot is where it belongs.

        A process that leaves its world may then capture its last state without the others: whatever they
        do, the snapshot before it is whole.
        """
        return not self._needs_copies or self.captured_step is None or self._copied_step >= self.captured_step

    def agree(self, interval_steps: int, copied_step: int) -> None:
        """Take in what was agreed on: steps between captures, and the newest step copied by every host."""
        if not self._is_fixed:
            self.interval_steps = max(interval_steps, 1)
        self._copied_step = copied_step

    def decide(self, step: int, num_steps: int | None) -> Decision:
        """What to do with the state after `step`.

        Due are the first and the last step of the run (where `num_steps` is known), and each that the
        cadence names; what was skipped stays due.
        """
        is_last = num_steps is not None and step + 1 >= num_steps
        if not (is_last or self.is_due(step)):
            return Decision.PASS
        return Decision.CAPTURE if self.is_copied else Decision.SKIP

    def captured(self, step: int) -> None:
        """The state after `step` was captured."""
        self.captured_step = step

    def is_due(self, step: int) -> bool:
        """Whether the cadence wants the state after `step`."""
        if self.captured_step is None:
            return True
        if self._is_fixed:
            return (step + 1) // self.interval_steps > (self.captured_step + 1) // self.interval_steps
        return step - self.captured_step >= self.interval_steps

    def must_propose(self, step: int) -> bool:
        """Whether, after the decision on `step`, the processes have to agree anew."""
        if not self.needs_agreement or self.captured_step is None:
            return False
        since_steps = step - self.captured_step
        if not self._is_fixed and since_steps % REVIEW_STEPS == 0:
            return True
        is_power_of_two = since_steps > 0 and since_steps & (since_steps - 1) == 0
        return not self.is_copied and (is_power_of_two or self.is_due(step + 1))
