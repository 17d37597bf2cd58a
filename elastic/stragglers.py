"""Stragglers: slices that are slower than the others, by how much, and whether input or devices are.

Pure: fed with the history as it is written. In lockstep a slow slice makes every step slow on all, so step
times tell nothing; what each tells of itself does: the time its host takes for a step (reading and placing
its batch, and its loop's Python), and now and then that of a tiny program on its own devices. Medians over a
window are compared with the median of the other slices'; several windows in a row must agree, either way.
Where slices have several hosts, each host is compared with all others.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

from elastic.members import member_of
from elastic.records import Record, StepCommitted, StragglerOver, StragglerSeen, WorldFormed
from reshard.errors import UsageError
from reshard.ids import HostId

WHERES = ("input", "device")
MAX_WINDOWS = 4
"""Windows of a slice's samples that are kept while the others' are not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerRule:
    """When a slice counts as slow. `factor` is of its median over that of the others."""

    factor: float = 1.5
    num_windows: int = 4
    """Windows in a row that must find it slow, or well again."""
    input_steps: int = 16
    device_probes: int = 3
    min_share: float = 0.1
    """Input only counts if it costs at least this part of a step more than the others'."""
    min_device_s: float = 2e-4
    """Programs of microseconds differ by the noise of their dispatch."""

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise UsageError(f"a straggler's factor must be more than 1, not {self.factor}")

    def window(self, where: str) -> int:
        """Samples of each slice in a window."""
        return self.input_steps if where == "input" else self.device_probes


@dataclass(slots=True, kw_only=True)
class StragglerWatch:
    """What is known of the present world's hosts. `hear` takes each record once; returns what to write."""

    rule: StragglerRule = field(default_factory=StragglerRule)
    hosts_per_slice: int = 1
    generation: int = 0
    world: tuple[int, ...] = ()
    """Its members (`elastic.members`)."""
    seen: dict[tuple[str, int], StragglerSeen] = field(default_factory=dict)
    """The stragglers of now."""
    _samples: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    _step_s: list[float] = field(default_factory=list)
    _streaks: defaultdict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    """Windows in a row that contradict what is told of a host."""

    def hear(self, record: Record) -> list[StragglerSeen | StragglerOver]:
        """Take in a record of the history."""
        if isinstance(record, WorldFormed):
            return self._enter(record)
        if isinstance(record, StepCommitted) and record.generation == self.generation:
            return self._count(record)
        return []

    def _enter(self, formed: WorldFormed) -> list[StragglerSeen | StragglerOver]:
        over = [self._over(seen, formed.unix_s, formed.newest_committed) for seen in self.seen.values()]
        num = self.hosts_per_slice
        self.generation = formed.generation
        self.world = tuple(index * num + host for index in formed.slices for host in range(num))
        self.seen = {}
        self._samples = {where: {member: [] for member in self.world} for where in WHERES}
        self._step_s = []
        self._streaks.clear()
        return list(over)

    def _count(self, record: StepCommitted) -> list[StragglerSeen | StragglerOver]:
        member = member_of(HostId(record.slice_index, record.host_index), self.hosts_per_slice)
        if member not in self.world:
            return []
        if not record.compile_s:  # what compiles now may have been in another's cache
            self._samples["input"][member].append(record.host_s)
            self._step_s = [*self._step_s[-63:], record.step_s]
        if record.device_s is not None:
            self._samples["device"][member].append(record.device_s)
        told: list[StragglerSeen | StragglerOver] = []
        for where in WHERES:
            own = self._samples[where][member]
            del own[: -MAX_WINDOWS * self.rule.window(where)]  # where another host tells nothing
            samples = self._samples[where]
            if len(self.world) > 1 and all(len(o) >= self.rule.window(where) for o in samples.values()):
                medians = {index: statistics.median(told_s) for index, told_s in samples.items()}
                self._samples[where] = {index: [] for index in self.world}
                told += self._judge(where, medians, record)
        return told

    def _judge(
        self, where: str, medians: dict[int, float], record: StepCommitted
    ) -> list[StragglerSeen | StragglerOver]:
        told: list[StragglerSeen | StragglerOver] = []
        step_s = statistics.median(self._step_s) if self._step_s else 0.0
        floor_s = self.rule.min_share * step_s if where == "input" else self.rule.min_device_s
        for index, own_s in medians.items():
            others_s = statistics.median(s for other, s in medians.items() if other != index)
            is_slow = own_s > self.rule.factor * others_s and own_s - others_s >= floor_s
            key = (where, index)
            self._streaks[key] = self._streaks[key] + 1 if is_slow != (key in self.seen) else 0
            if self._streaks[key] < self.rule.num_windows:
                continue
            self._streaks[key] = 0
            if key in self.seen:
                told.append(self._over(self.seen.pop(key), record.unix_s, record.step))
                continue
            self.seen[key] = StragglerSeen(
                unix_s=record.unix_s,
                generation=record.generation,
                slice_index=index // self.hosts_per_slice,
                host_index=index % self.hosts_per_slice,
                step=record.step,
                where=where,
                factor=round(own_s / max(others_s, 1e-6), 2),
                own_s=own_s,
                others_s=others_s,
            )
            told.append(self.seen[key])
        return told

    def _over(self, seen: StragglerSeen, unix_s: float, step: int) -> StragglerOver:
        return StragglerOver(
            unix_s=unix_s,
            generation=self.generation,
            slice_index=seen.slice_index,
            host_index=seen.host_index,
            step=step,
            where=seen.where,
        )
