"""Workers killed at the same step, try after try: no lost slices, but a step that needs too much memory.

Pure: the machine tells of each death of a worker inside a world. Deaths of one world count as one try, and
any new step forgets them. The kernel kills for want of memory by SIGKILL, as an operator or a test does, so
without evidence of it (`elastic.memory_evidence`) a few tries are made before the job is ended.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """The deaths after one step, in worlds that came one after the other."""

    step: int = -1
    """The newest committed step when they died: they died in the one after it."""
    generations: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()
    signals: tuple[str, ...] = ()
    evidence: str = ""
    """What the newest of them left that speaks for want of memory; "" as soon as one try left nothing."""

    @property
    def num_tries(self) -> int:
        """How many worlds had a worker killed at this step."""
        return len(self.generations)

    def died(self, step: int, generation: int, slice_index: int, signal: str, evidence: str) -> Deaths:
        """A worker of a world was killed by a signal, after the newest step that anybody has committed."""
        if step != self.step or not self.generations:
            kept = Deaths(step=step, evidence=evidence)
        elif generation == self.generations[-1]:
            return Deaths(
                step=step,
                generations=self.generations,
                slices=(*self.slices, slice_index),
                signals=(*self.signals, signal),
                evidence=self.evidence or evidence,
            )
        else:
            kept = self
        return Deaths(
            step=step,
            generations=(*kept.generations, generation),
            slices=(*kept.slices, slice_index),
            signals=(*kept.signals, signal),
            evidence=evidence if kept.evidence else "",
        )

    def verdict(self, max_tries: int) -> str:
        """Why the job must stop, "" as long as it need not: after `max_tries`, or two that the kernel owns up
        to.
        """
        if self.num_tries < (min(2, max_tries) if self.evidence else max_tries):
            return ""
        who = ", ".join(map(str, self.slices[:MAX_NAMED]))
        by = " and ".join(sorted(set(self.signals)))
        said = f"killed at step {self.step + 1} {self.num_tries} times in a row (exit by {by}; slices {who})"
        if "SIGKILL" not in self.signals:
            return f"{said}: native code of the step crashes; the workers' logs have its last words"
        if self.evidence:
            return f"{said}: out of memory, {self.evidence}; let the step or its input need less"
        return (
            f"{said}: out of memory? No control group of the workers counts a kill for want of memory; look "
            "at the hosts' kernel logs, and at what the script does in that step"
        )
