"""One piece of one array that goes from one host to another."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.boxes import Box, contains, format_box, volume
from reshard.errors import UsageError
from reshard.holdings import Tier
from reshard.ids import HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copy `piece` of array `path` from the source's shard `source_box` into the target's `target_box`.

    `nbytes` is that of the piece; `tier` is where the source has the shard. A transfer from a host to
    itself is local and moves nothing over the network. Raises `UsageError` unless the piece has elements
    and lies in both boxes.
    """

    path: str
    source: HostId
    target: HostId
    source_box: Box
    piece: Box
    target_box: Box
    nbytes: int
    tier: Tier = "shm"

    def __post_init__(self) -> None:
        num_elements = volume(self.piece)
        ranks_agree = len(self.piece) == len(self.source_box) == len(self.target_box)
        if not (
            ranks_agree and contains(self.source_box, self.piece) and contains(self.target_box, self.piece)
        ):
            raise UsageError(f"{self}: the piece is not inside both boxes", path=self.path)
        if num_elements < 1 or self.nbytes < 1 or self.nbytes % num_elements:
            raise UsageError(f"{self}: {self.nbytes} bytes for {num_elements} elements", path=self.path)

    def __str__(self) -> str:
        return f"{self.path}{format_box(self.piece)} {self.source} → {self.target}"

    @property
    def is_local(self) -> bool:
        """Whether source and target are one host."""
        return self.source == self.target

    @property
    def is_reuse(self) -> bool:
        """Whether the target already has the very box it needs, so that not even a local copy is due."""
        return self.is_local and self.source_box == self.piece == self.target_box

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.nbytes // volume(self.piece)

    @property
    def order(self) -> tuple[HostId, str, Box, Box, HostId]:
        """The key plans are sorted by."""
        return self.target, self.path, self.target_box, self.piece, self.source
