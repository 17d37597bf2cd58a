"""Workers killed at the same step, try after try: no lost slices, but a step that needs too much memory.

Pure: the machine tells of each death of a worker inside a world. Deaths of one world count as one try, and
any new step forgets them. The kernel kills for want of memory by SIGKILL, as an operator or a test does, so
without evidence of it (`elastic.memory_evidence`) a few tries are made before the job is ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.members import host_of, name_of

MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """The deaths after one step, in worlds that came one after the other."""

    step: int = -1
    """The newest committed step when they died: they died in the one after it."""
    generations: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    signals: tuple[str, ...] = ()
    evidence: str = ""
    """What the newest of them left that speaks for want of memory; "" as soon as one try left nothing."""

    @property
    def num_tries(self) -> int:
        """How many worlds had a worker killed at this step."""
        return len(self.generations)

    def died(self, step: int, generation: int, member: int, signal: str, evidence: str) -> Deaths:
        """A worker of a world was killed by a signal, after the newest step that anybody has committed."""
        if step != self.step or not self.generations:
            kept = Deaths(step=step, evidence=evidence)
        elif generation == self.generations[-1]:
            return Deaths(
                step=step,
                generations=self.generations,
                members=(*self.members, member),
                signals=(*self.signals, signal),
                evidence=self.evidence or evidence,
            )
        else:
            kept = self
        return Deaths(
            step=step,
            generations=(*kept.generations, generation),
            members=(*kept.members, member),
            signals=(*kept.signals, signal),
            evidence=evidence if kept.evidence else "",
        )

    def verdict(self, max_tries: int, hosts_per_slice: int = 1) -> str:
        """Why the job must stop, "" as long as it need not: after `max_tries`, or two that the kernel owns up
        to.
        """
        if self.num_tries < (min(2, max_tries) if self.evidence else max_tries):
            return ""
        who = _names(self.members[:MAX_NAMED], hosts_per_slice)
        by = " and ".join(sorted(set(self.signals)))
        said = f"killed at step {self.step + 1} {self.num_tries} times in a row (exit by {by}; {who})"
        if "SIGKILL" not in self.signals:
            return f"{said}: native code of the step crashes; the workers' logs have its last words"
        if self.evidence:
            return f"{said}: out of memory, {self.evidence}; let the step or its input need less"
        return (
            f"{said}: out of memory? No control group of the workers counts a kill for want of memory; look "
            "at the hosts' kernel logs, and at what the script does in that step"
        )


def _names(members: tuple[int, ...], hosts_per_slice: int) -> str:
    if hosts_per_slice == 1:
        return f"slices {', '.join(map(str, members))}"
    return ", ".join(name_of(host_of(member, hosts_per_slice), hosts_per_slice) for member in members)
