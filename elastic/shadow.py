"""Where the compiling of programs that are needed next stands: a part of the machine's state."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """`slices` are those whose hosts have a process in the group under way (none: there is no group)."""

    number: int = 0
    """Of the newest group."""
    slices: tuple[int, ...] = ()
    began_s: float = 0.0
    missing: frozenset[int] = frozenset()
    """Who has not yet told what the group waits for."""
    service_address: str | None = None
    is_entered: bool = False
    """Whether the processes are in their world."""
    compiled: frozenset[int] = frozenset()
    """Numbers of slices whose programs are in the compile cache, as a world of so many has made a step."""
    tried: frozenset[tuple[int, int]] = frozenset()
    """Generation and number of slices of groups that failed or were skipped: not tried again there."""

    def next_size(
        self, num_now: int, num_min: int, num_max: int, num_attached: int, generation: int
    ) -> int | None:
        """For how many slices to compile next: one fewer than now, then one more; None when that is done."""
        for size in (num_now - 1, num_now + 1):
            is_possible = num_min <= size <= min(num_max, num_attached) and size >= 1
            if is_possible and size not in self.compiled and (generation, size) not in self.tried:
                return size
        return None

    def begun(self, slices: tuple[int, ...], now_s: float) -> Shadow:
        """A new group of these slices."""
        return replace(
            self,
            number=self.number + 1,
            slices=slices,
            began_s=now_s,
            missing=frozenset(slices),
            service_address=None,
            is_entered=False,
        )

    def ended(self) -> Shadow:
        """Without a group."""
        return replace(self, slices=(), missing=frozenset(), service_address=None, is_entered=False)
