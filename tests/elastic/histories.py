"""Histories of runs, written by hand: a builder that keeps the clock, the samples and the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.records import (
    CopiesCompared,
    CorruptionSuspected,
    FaultInjected,
    LossDetected,
    PhaseEntered,
    Record,
    RestoreChecked,
    RunEnded,
    RunStarted,
    SnapshotsVerified,
    StateRestored,
    StepCommitted,
    SuspectBox,
    WorldFormed,
)

BATCH = 4
STEP_S = 0.1
EPOCH = 40
STATE_BYTES = 1_000_000


def ids_at(position: int, count: int = BATCH, epoch: int = EPOCH) -> tuple[int, ...]:
    """The samples of an endless stream whose every epoch is a (different) permutation of `range(epoch)`."""
    return tuple((place * 7 + place // epoch * 3) % epoch for place in range(position, position + count))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWithLook(RunEnded):
    """A RunEnded that tells the newest step a snapshot still held: -1 if none did, None if nobody looked."""

    restorable_step: int | None = None


class History:
    """Appends records; steps count from 1, step `s` begins at place `(s - 1) * BATCH` of the stream."""

    def __init__(self, slices: int = 3, *, target: int | None = 20, at: float = 1000.0) -> None:
        self.now = at
        self.records: list[Record] = []
        self.world: tuple[int, ...] = tuple(range(slices))
        self.generation = 0
        self.newest = 0
        self.add(
            RunStarted(
                unix_s=self.now,
                run_id="r1",
                adapter="multicontroller",
                in_place="proven",
                simulated_faults=False,
                slices=slices,
                min_slices=1,
                devices_per_host=2,
                replicas=slices,
                seed=0,
                target_steps=target,
            )
        )

    def add(self, record: Record) -> None:
        self.records.append(record)

    def wait(self, seconds: float) -> History:
        self.now += seconds
        return self

    def phase(self, phase: str, after: float = 0.0, why: str = "") -> History:
        self.now += after
        self.add(PhaseEntered(unix_s=self.now, generation=self.generation, phase=phase, why=why))
        return self

    def first(self, *, restored: int | None = None) -> History:
        """Form the first world and let it dispatch its first step."""
        self.formed("first", restored, check=False)
        self.add(CopiesCompared(unix_s=self.now, generation=self.generation, num_captures=1))
        return self.phase("REPLAYING").phase("RUNNING")

    def formed(
        self,
        mode: str,
        restored: int | None,
        *,
        slices: tuple[int, ...] | None = None,
        check: bool = True,
        bytes_moved: int = 0,
        bytes_lower_bound: int = 0,
    ) -> History:
        world = self.world if slices is None else slices
        self.generation += 1
        lost = tuple(sorted(set(self.world) - set(world)))
        joined = tuple(sorted(set(world) - set(self.world)))
        self.world = world
        self.add(
            WorldFormed(
                unix_s=self.now,
                generation=self.generation,
                slices=world,
                mode=mode,
                restored_step=restored,
                newest_committed=self.newest,
                lost=lost,
                joined=joined,
                bytes_moved=bytes_moved,
                bytes_lower_bound=bytes_lower_bound,
                explanation="",
            )
        )
        if check and restored is not None:
            digest = f"digest-{restored}"
            self.add(
                RestoreChecked(
                    unix_s=self.now,
                    generation=self.generation,
                    step=restored,
                    captured_digest=digest,
                    restored_digest=digest,
                )
            )
        return self

    def steps(
        self,
        first: int,
        last: int,
        *,
        by: tuple[int, ...] | None = None,
        generation: int | None = None,
        change: Callable[[StepCommitted], StepCommitted] = lambda commit: commit,
        compile_s: float = 0.0,
    ) -> History:
        """Commit steps `first … last`, each by every slice of the world or `by`; `change` may falsify it."""
        for step in range(first, last + 1):
            self.now += STEP_S + compile_s
            self.newest = max(self.newest, step)
            position = (step - 1) * BATCH
            for index in self.world if by is None else by:
                commit = StepCommitted(
                    unix_s=self.now,
                    generation=self.generation if generation is None else generation,
                    slice_index=index,
                    step=step,
                    position=position,
                    sample_ids=ids_at(position),
                    loss=5.0 / (step + 4) + 0.5,
                    step_s=STEP_S,
                    stall_s=0.001 * (index + 1),
                    captured_bytes=STATE_BYTES,
                    compile_s=compile_s,
                )
                self.add(change(commit))
            compile_s = 0.0
        return self

    def lose(self, slice_index: int, *, injected: bool = True, cause: str = "killed by SIGKILL") -> History:
        """A fault, 20 ms later its detection."""
        self.now += 0.03
        if injected:
            self.add(FaultInjected(unix_s=self.now, fault="kill", slice_index=slice_index))
        last_life = self.now
        self.now += 0.02
        self.add(
            LossDetected(
                unix_s=self.now,
                generation=self.generation,
                slice_index=slice_index,
                cause=cause,
                detector="process-exit",
                last_life_unix_s=last_life,
            )
        )
        return self

    def recover(
        self, mode: str, restored: int | None, *, slices: tuple[int, ...], **formed: int | bool
    ) -> History:
        """FENCING for 0.05 s, PLANNING 0.01 s, RESTORING 0.1 s, REBUILDING 0.2 s, then REPLAYING."""
        self.phase("FENCING").phase("PLANNING", 0.05).wait(0.01)
        self.formed(mode, restored, slices=slices, **formed)
        self.phase("RESTORING")
        self.now += 0.1
        for index in slices:
            if restored is None:
                continue
            at = {"unix_s": self.now, "generation": self.generation, "slice_index": index, "step": restored}
            self.add(SnapshotsVerified(**at, num_shards=5))
            self.add(StateRestored(**at, bytes_from={"shm": STATE_BYTES}, form_s=0.05, restore_s=0.04))
        return self.phase("REBUILDING").phase("REPLAYING", 0.2)

    def end(
        self,
        outcome: str = "completed",
        *,
        error: str = "",
        digest: str = "d",
        restorable: int | None = None,
    ) -> History:
        ended = EndedWithLook(
            unix_s=self.now,
            generation=self.generation,
            outcome=outcome,
            error=error,
            final_step=self.newest,
            state_digest=digest,
            restorable_step=restorable,
        )
        self.add(ended)
        return self


def undisturbed(steps: int = 20) -> History:
    return History(target=steps).first().steps(1, steps).end()


def killed_in_place() -> History:
    """Slice 1 dies after step 10; the others restore it, lose nothing, replay nothing."""
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 10, slices=(0, 2)).phase("RUNNING")
    return history.steps(11, 20, compile_s=0.05).end()


def killed_and_replayed() -> History:
    """Slice 1 dies after step 10, and the newest snapshot that covers is that of step 8."""
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 8, slices=(0, 2)).steps(9, 10).phase("RUNNING")
    return history.steps(11, 20).end()


def killed_and_rejoined() -> History:
    """Slice 1 dies after step 10; it comes back after step 14."""
    history = History().first().steps(1, 10).lose(1)
    history.recover("in-place", 9, slices=(0, 2)).steps(10, 10).phase("RUNNING").steps(11, 14)
    moved = {"bytes_moved": STATE_BYTES, "bytes_lower_bound": STATE_BYTES}
    history.recover("scale-up", 14, slices=(0, 1, 2), **moved).phase("RUNNING")
    return history.steps(15, 20).end()


def corrupted() -> History:
    """Two copies differ after step 6; the audit of step 8 finds that of slice 1 wrong."""
    history = History().first().steps(1, 6)
    at = {"path": "['w']", "box": ((0, 8), (0, 2))}
    finding = {"generation": 1, "num_arrays": 1, "num_boxes": 1, "slices": (0, 1, 2)}
    two = SuspectBox(**at, slices=(0, 1), suspects=(0, 1), is_majority=False)
    history.add(
        CorruptionSuspected(
            unix_s=history.now,
            step=6,
            is_audit=False,
            suspects=(0, 1),
            is_majority=False,
            boxes=(two,),
            **finding,
        )
    )
    history.steps(7, 8)
    history.add(CopiesCompared(unix_s=history.now, generation=1, num_captures=1, is_audit=True))
    three = SuspectBox(**at, slices=(0, 1, 2), suspects=(1,), is_majority=True, devices=(2,))
    history.add(
        CorruptionSuspected(
            unix_s=history.now,
            step=8,
            is_audit=True,
            suspects=(1,),
            is_majority=True,
            boxes=(three,),
            **finding,
        )
    )
    return history.steps(9, 20).end()


def with_ids(
    step: int, ids: tuple[int, ...], *, only_slice: int | None = None
) -> Callable[[StepCommitted], StepCommitted]:
    """A change for `History.steps`: the journal of `step` says `ids`."""

    def change(commit: StepCommitted) -> StepCommitted:
        if commit.step != step or only_slice not in (None, commit.slice_index):
            return commit
        return replace(commit, sample_ids=ids)

    return change
