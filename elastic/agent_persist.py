"""An agent's part of the persistent tier: its share of each due snapshot, written by a process of its own.

All agents of a world begin by themselves, at the same captured steps. The snapshot is first copied out of its
slot, which the worker overwrites two captures later. Nothing here holds up the worker or the heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tenacity

from elastic.events import FinishPersist, Persisted, PersistSettled, SharePersisted, SnapshotSummary
from elastic.job import PersistSpec
from reshard.errors import ElasticError, RetryLaterError, UsageError
from reshard.persist_shares import host_persist_shares
from snapshot.arena import Arena
from snapshot.manifest import Manifest
from snapshot.persist import abort, begin
from snapshot.persist_format import PersistFacts
from snapshot.persist_jobs import Done, Failed, FinishJob, Job, WriteJob
from snapshot.persist_process import WriterProcess
from snapshot.persist_tree import TreeDescription
from snapshot.slot_reader import SlotReader

ATTEMPTS = 3
SHARE_BOUND_S = 600.0
"""How long a share may be under way before the next one takes its place."""
MAX_FACTS = 3
"""So many shares of this host may wait for their snapshot to be put together."""
RETRY_WAIT = tenacity.wait_random_exponential(multiplier=0.5, max=5.0)
_HOPELESS = ("overwritten-source", "corrupt-source")
"""Failures that another attempt at the same copy cannot mend."""


class _Share:
    """One snapshot whose share this host writes, in a thread of its own; `stop` gives it up."""

    def __init__(self, generation: int, step: int, after: _Share | None) -> None:
        self.generation = generation
        self.step = step
        self.after = after
        self.began_s = time.monotonic()
        self.stopped = threading.Event()
        self.thread = threading.Thread()
        self._lock = threading.Lock()
        self._process: WriterProcess | None = None

    def run(self, job: Job) -> Done | Failed:
        """Do a job in a writer process, again when it fails; return how the last attempt ended."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(self._is_worth_another),
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(ATTEMPTS), tenacity.stop_when_event_set(self.stopped)
            ),
            wait=RETRY_WAIT,
            sleep=tenacity.sleep_using_event(self.stopped),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        result: Done | Failed = retrying(self._run_once, job)
        return result

    def stop(self) -> None:
        """End what is being written for it."""
        self.stopped.set()
        with self._lock:
            process = self._process
        if process is not None:  # of the lowest priority, it may take a while to end
            threading.Thread(target=process.stop, name="persist-stop", daemon=True).start()

    def _is_worth_another(self, result: Done | Failed) -> bool:
        return isinstance(result, Failed) and result.kind not in _HOPELESS and not self.stopped.is_set()

    def _run_once(self, job: Job) -> Done | Failed:
        with self._lock:
            if self.stopped.is_set():
                return Failed(kind="stopped", message="given up")
            self._process = process = WriterProcess(job)
        result = process.wait()
        with self._lock:
            self._process = None
        return result


class Persister:
    """Writes this host's shares, and finishes snapshots when it is told to; for the agent's one thread.

    `tell` gets SharePersisted and Persisted, from other threads.
    """

    def __init__(
        self,
        spec: PersistSpec,
        job_id: str,
        member: int,
        replicas: int,
        arena: Arena,
        tell: Callable[[Any], None],
    ) -> None:
        self._spec = spec
        self._job_id = job_id
        self._member = member
        self._replicas = replicas
        self._arena = arena
        self._tell = tell
        self._tree: TreeDescription | None = None
        self._captured = (-1, -1)
        self._share: _Share | None = None
        self._left_out: SharePersisted | None = None
        """A share that was due while another was being written: told when it was not the run's last."""
        self._unsettled: tuple[int, int] | None = None
        """Generation and step that was begun last, until all hosts' shares are put together, or given up."""
        self._facts: dict[tuple[int, int], PersistFacts] = {}
        self._finishing: set[tuple[int, int]] = set()

    def describe(self, tree: TreeDescription) -> None:
        """The worker tells how its state's tree looks."""
        self._tree = tree

    def captured(self, generation: int, step: int) -> None:
        """The worker has captured a step: write this host's share of it, if it is due."""
        before, self._captured = self._captured, (generation, step)
        self._tell_left_out()
        if before[0] == generation and self._spec.is_due(step, before[1]):
            if self._unsettled is not None and not self._give_up_late():
                why = f"the tier is too slow: step {self._unsettled[1]} was still being written"
                self._left_out = SharePersisted(
                    member=self._member, generation=generation, step=step, error=why, left_out=True
                )
            else:
                self._begin(generation, step)

    def loop_ended(self) -> None:
        """The worker's loop is over: what it captured last is to be persisted, unless it is already."""
        self._left_out = None  # if it is the last one, it is written after all
        generation, step = self._captured
        under_way = (self._share.generation, self._share.step) if self._share is not None else None
        if step >= 0 and under_way != self._captured:
            self._begin(generation, step)

    def finish(self, command: FinishPersist) -> None:
        """Put the shares of all hosts together for good; tells Persisted."""
        snapshot = (command.generation, command.step)
        if snapshot in self._finishing:
            return  # told again by a coordinator that has taken over
        self._finishing.add(snapshot)
        threading.Thread(target=self._finish, args=(command,), name="persist-finish", daemon=True).start()

    def cancel(self) -> None:
        """The world is being left: what is written for it will not be complete. Ends its process."""
        self._tell_left_out()
        self._unsettled = None
        if self._share is not None:
            self._share.stop()

    def _give_up_late(self) -> bool:
        """End a share that hangs (a disk that does not answer); tells whether that was so."""
        share = self._share
        if share is None or time.monotonic() - share.began_s < SHARE_BOUND_S:
            return False
        if share.thread.is_alive():
            share.stop()
            self._tell_share(share.generation, share.step, f"not written within {SHARE_BOUND_S:g} s")
        return True

    def settled(self, command: PersistSettled) -> None:
        """A step is in the persistent tier, or will not be: the next that is due can begin."""
        settled = (command.generation, command.step)
        if settled == self._unsettled:
            self._unsettled = None
        share = self._share
        if command.failed and share is not None and settled == (share.generation, share.step):
            share.stop()

    def _tell_left_out(self) -> None:
        left_out, self._left_out = self._left_out, None
        if left_out is not None:
            self._tell(left_out)

    def _begin(self, generation: int, step: int) -> None:
        self._unsettled = (generation, step)
        share = self._share = _Share(generation, step, self._share)
        share.thread = threading.Thread(target=self._write, args=(share,), name="persist", daemon=True)
        share.thread.start()

    def _write(self, share: _Share) -> None:
        if share.after is not None:
            share.after.thread.join()
            share.after = None
        error = ""
        try:
            facts = self._write_share(share)
        except (ElasticError, OSError) as failed:
            error = str(failed)
        else:
            kept = list(self._facts.items())[1 - MAX_FACTS :]
            self._facts = {**dict(kept), (share.generation, share.step): facts}
        if not share.stopped.is_set():
            self._tell_share(share.generation, share.step, error)

    def _write_share(self, share: _Share) -> PersistFacts:
        if self._tree is None:
            raise UsageError("the worker has not told how its state's tree looks")
        pinned = self._arena.pin(share.step, share.generation)
        if pinned is None:
            raise RetryLaterError(
                "it was overwritten before it could be copied",
                remedy="Capture less often, or smaller states.",
            )
        try:
            manifest = _read_manifest(pinned)
            layout = manifest.static.layout
            staging = self._staging(share.generation, share.step)
            job = WriteJob(
                staging=str(staging),
                slots=(str(pinned),),
                step=share.step,
                generation=share.generation,
                layout=layout,
                tree=self._tree,
                shards=host_persist_shares(layout, manifest.static.host, self._replicas),
            )
            result = share.run(job)
        finally:
            self._arena.unpin()
        if isinstance(result, Failed):
            abort(self._spec.directory, staging)  # nobody will finish it: its room is needed
            raise RetryLaterError(result.message, remedy=result.remedy or None)
        return PersistFacts(
            step=share.step,
            generation=share.generation,
            position=manifest.position,
            layout=layout,
            tree=self._tree,
            job_id=self._job_id,
            epoch=self._spec.epoch,
        )

    def _finish(self, command: FinishPersist) -> None:
        facts = self._facts.get((command.generation, command.step))
        if facts is None:
            self._tell_failed(command, "the agent that was to finish it has written no share")
            return
        directory = self._spec.directory
        try:
            job = FinishJob(
                root=str(directory),
                staging=str(self._staging(command.generation, command.step)),
                facts=facts,
                restored_steps=dict(command.restored_steps),
                keep=self._spec.keep,
            )
        except (ElasticError, OSError) as error:
            self._tell_failed(command, str(error))
            return
        result = _Share(command.generation, command.step, None).run(job)
        if isinstance(result, Failed):
            self._tell_failed(command, result.message)
            return
        layout = facts.layout
        self._tell(
            Persisted(
                member=self._member,
                generation=command.generation,
                step=command.step,
                snapshot=SnapshotSummary(
                    step=facts.step,
                    generation=facts.generation,
                    layout=layout,
                    holdings=(),
                    position=facts.position,
                ),
                persisted_bytes=sum(array.nbytes for array in layout.arrays),
            )
        )

    def _staging(self, generation: int, step: int) -> Path:
        return begin(self._spec.directory, step, generation, epoch=self._spec.epoch)

    def _tell_share(self, generation: int, step: int, error: str) -> None:
        self._tell(SharePersisted(member=self._member, generation=generation, step=step, error=error))

    def _tell_failed(self, command: FinishPersist, error: str) -> None:
        self._tell(
            Persisted(member=self._member, generation=command.generation, step=command.step, error=error)
        )


def _read_manifest(path: Path) -> Manifest:
    with SlotReader(path) as reader:
        manifest = reader.read_manifest()
    assert manifest is not None  # it was pinned complete
    return manifest
