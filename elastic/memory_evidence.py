"""Whether the kernel killed a process for want of memory: what its control group counts.

Works with cgroup v2 (`memory.events`) and v1 (`memory.oom_control`). The count is of the group, which others
may share: it says that so many in it were killed since the watch began.
"""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT_BYTES = 1 << 60
"""What cgroup v1 shows where no limit is set is near 2^63."""


class MemoryWatch:
    """The control group of one process, and its count of kills when the watch first saw it."""

    def __init__(self, pid: int, *, root: Path = CGROUPS, proc: Path = Path("/proc")) -> None:
        self._pid = pid
        self._root = root
        self._proc = proc
        self._group: Path | None = None
        self._before = 0
        self.look()

    def look(self) -> None:
        """Find the process's group; to be called while it lives, as it may move to another."""
        group = memory_group(self._pid, self._root, self._proc)
        if group is not None and group != self._group:
            self._group, self._before = group, num_oom_kills(group) or 0

    def evidence(self) -> str:
        """A sentence's end on the kills of the group since then; "" where none are known."""
        if self._group is None:
            return ""
        num = (num_oom_kills(self._group) or 0) - self._before
        if num <= 0:
            return ""
        limit = limit_bytes(self._group)
        of_limit = "" if limit is None else f" (its limit is {limit / 1e6:.1f} MB)"
        times = "once" if num == 1 else f"{num} times"
        return f"the kernel killed {times} for want of memory in control group {self._group.name}{of_limit}"


def memory_group(pid: int, root: Path = CGROUPS, proc: Path = Path("/proc")) -> Path | None:
    """The directory of the group that limits a process's memory; None where there is none to see."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    v2 = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.strip("/")
        if "memory" in controllers.split(","):
            return _if_there(root / "memory" / inside)
        if not controllers:
            v2 = _if_there(root / inside) or _if_there(root / "unified" / inside)
    return v2


def _if_there(group: Path) -> Path | None:
    return group if ".." not in group.parts and group.is_dir() else None


def num_oom_kills(group: Path) -> int | None:
    """How many processes of a group the kernel has killed for want of memory; None if it does not count."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (group / name).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdecimal():
                return int(value)
    return None


def limit_bytes(group: Path) -> int | None:
    """The group's own limit of memory; None without one."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (group / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < NO_LIMIT_BYTES:
            return int(text)
    return None
