"""What the persistent tier holds: the complete snapshots below its root, by their facts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CorruptCopyError, ElasticError
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.lineage import is_on_lineage
from snapshot.contents import RejectedCopy
from snapshot.persist_format import FACTS_NAME, ITEM_NAME, PersistFacts, decode_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted:
    """A complete snapshot in the persistent tier."""

    path: Path
    facts: PersistFacts

    @property
    def step(self) -> int:
        """The step after which the state was captured."""
        return self.facts.step

    @property
    def generation(self) -> int:
        """The generation that captured it."""
        return self.facts.generation

    @property
    def position(self) -> int:
        """The place in the sample stream after that step."""
        return self.facts.position

    @property
    def layout(self) -> Layout:
        """The layout it was captured in."""
        return self.facts.layout

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts snapshots from old to new: by job, by generation, by step."""
        return self.facts.epoch, self.generation, self.step

    def is_on_lineage(self, epoch: int, restored_steps: Mapping[int, int]) -> bool:
        """Tell whether the job of `epoch` still stands on this snapshot; see `reshard.lineage`.

        What an earlier job left precedes all generations of this one.
        """
        generation = self.generation if self.facts.epoch == epoch else -1
        return is_on_lineage(self.step, generation, restored_steps)

    def holdings(self, host: HostId) -> tuple[Holding, ...]:
        """Return what `host` can read here, for a plan: every box of the layout, unverified."""
        return tuple(
            Holding(host=host, step=self.step, path=array.path, box=box, checksum=0, tier="persistent")
            for array in self.layout.arrays
            for box in sorted(set(self.layout.boxes(array)))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RootContents:
    """The complete snapshots below a root, the newest first, and what only looks like one."""

    persisted: tuple[Persisted, ...]
    rejected: tuple[RejectedCopy, ...]


def read_persisted(path: Path) -> Persisted:
    """Return the snapshot in the directory `path`, by what its facts say; its arrays are not read.

    Raises CorruptCopyError, saying why, when it is not one.
    """
    try:
        facts = decode_facts((path / ITEM_NAME / FACTS_NAME).read_bytes())
    except FileNotFoundError as error:
        raise CorruptCopyError(f"{path} was not written by this project: no {FACTS_NAME}") from error
    except OSError as error:
        raise CorruptCopyError(f"{path}: {error}") from error
    if path.name != str(facts.step):
        raise CorruptCopyError(f"{path} holds the snapshot of step {facts.step}")
    return Persisted(path=path, facts=facts)


def read_root(root: Path) -> RootContents:
    """Return the complete snapshots below `root`, the newest first; a root that is not there has none."""
    persisted: list[Persisted] = []
    rejected: list[RejectedCopy] = []
    for path in _step_directories(root):
        try:
            persisted.append(read_persisted(path))
        except ElasticError as error:
            rejected.append(RejectedCopy(name=path.name, reason=error.message))
    persisted.sort(key=lambda found: found.order, reverse=True)
    return RootContents(persisted=tuple(persisted), rejected=tuple(rejected))


def list_persisted(root: Path) -> tuple[Persisted, ...]:
    """Return the complete snapshots below `root`, the newest first."""
    return read_root(root).persisted


def _step_directories(root: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [path for path in root.iterdir() if path.name.isascii() and path.name.isdecimal()]
    return []
