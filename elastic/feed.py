"""What a world's training loop is fed: the next samples of the stream, journalled before they are used."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from elastic.data import BatchMaker, Dataset
from elastic.events import WorldSpec
from reshard.batch_sizes import BatchSize, world_of
from reshard.batches import sample_ids
from reshard.errors import InvariantBrokenError
from snapshot.arena import Arena
from snapshot.journal import JournalRecord


class Feed:
    """The batches of one world, one step after the other.

    A step that was committed before takes as many samples as it took in the world that was the first to
    commit it; a new one as many as `size` has for this world.
    """

    def __init__(
        self,
        spec: WorldSpec,
        size: BatchSize,
        maker: BatchMaker,
        dataset: Dataset,
        seed: int,
        arenas: Iterable[Arena],
        position: int,
    ) -> None:
        self._spec = spec
        self._size = size
        self._maker = maker
        self._dataset = dataset
        self._seed = seed
        self._journal = StepJournal(arenas, spec)
        self.step = -1
        """The step in hand."""
        self.position = position
        """The place in the sample stream after the step in hand."""
        self.lr_scale = 1.0
        """What the step in hand multiplies the learning rate by."""

    def take(self, step: int) -> dict[str, jax.Array]:
        """The batch of `step`, the one after the step in hand.

        Raises InvariantBrokenError when the step used other samples before.
        """
        count = self._size.global_batch(self._slices_when_new(step))
        ids, _ = sample_ids(self._seed, self.position, count, len(self._dataset))
        self._journal.write(step, ids, self.position + count)
        self.step, self.position, self.lr_scale = step, self.position + count, self._size.lr_scale(count)
        return self._maker.make(ids)

    def _slices_when_new(self, step: int) -> int:
        worlds = self._spec.new_steps
        return world_of(worlds, step).num_slices if worlds else len(self._spec.slices)


class StepJournal:
    """Writes which samples a step uses into the journal of every host here, before the step is dispatched.

    A step that was committed before (it is run again after a recovery) must use the same samples.
    """

    def __init__(self, arenas: Iterable[Arena], spec: WorldSpec) -> None:
        self._arenas = () if spec.rehearsal else tuple(arenas)
        self._generation = spec.generation
        self._known: dict[int, list[int]] = {}
        for arena in self._arenas:
            reader = arena.journal_reader()
            for record in reader.since(-1 if spec.restore_step is None else spec.restore_step):
                if _is_binding(record, spec):
                    self._known[record.step] = [int(sample) for sample in record.sample_ids]
            reader.close()

    def write(self, step: int, ids: np.ndarray[tuple[int], np.dtype[np.int64]], position: int) -> None:
        """Journal a step; `position` is after it. Raises InvariantBrokenError when it used other samples
        before.
        """
        samples = ids.tolist()
        if self._known.get(step, samples) != samples:
            raise InvariantBrokenError(
                f"step {step} used other samples before",
                remedy="The data set, its order, the seed or the batch size has changed since; restore them.",
                step=step,
            )
        record = JournalRecord(step=step, generation=self._generation, position=position, sample_ids=samples)
        for arena in self._arenas:
            arena.journal().append(record)


def _is_binding(record: JournalRecord, spec: WorldSpec) -> bool:
    """Whether a step that a journal tells of must use the same samples when it is run again.

    Not if it only began in that world: it is free to take another batch size then, and a host that was away
    meanwhile still has the record of that beginning.
    """
    worlds = spec.new_steps
    return not worlds or record.generation >= world_of(worlds, record.step).generation
