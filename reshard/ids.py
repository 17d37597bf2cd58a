"""Names of hosts: a stable logical slice index and the host's index within the slice."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.errors import UsageError

_PATTERN = re.compile(r"s(0|[1-9][0-9]*)h(0|[1-9][0-9]*)", re.ASCII)
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, order=True)
class HostId:
    """A host of the job; ordered by slice, then by index within it. `str()` is `"s1h0"`.

    The slice index names a slice for the whole job. Its place among the others is another thing: a spare
    takes the place of a lost slice and keeps its name.
    Raises `UsageError` for an index that is negative or not below 2^31.
    """

    slice_index: int
    host_index: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.slice_index <= _MOST and 0 <= self.host_index <= _MOST):
            raise UsageError(
                f"host indices count from zero and are below 2^31, got slice {self.slice_index}, "
                f"host {self.host_index}",
                slice_index=self.slice_index,
                host_index=self.host_index,
            )

    def __str__(self) -> str:
        return f"s{self.slice_index}h{self.host_index}"

    @classmethod
    def parse(cls, text: str) -> HostId:
        """Read what `str()` writes: `"s1h0"`. Raises `UsageError` for anything else."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not a host: expected s<slice>h<host>, such as s1h0", text=text)
        return cls(int(match[1]), int(match[2]))
