"""The bounds of the machine's waits."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.bounds import check_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Bounds of the waits, in seconds. Each bounds one wait; none of them decides an order.

    Raises UsageError when two that depend on each other are in the wrong order.
    """

    start_s: float = 120.0
    """A worker process, from its start to its session."""
    session_hint_s: float = 20.0
    """After this long without a session it is told that the script has not called elastic.session() yet."""
    suspect_s: float = 4.0
    """How long a failed step may wait for the loss that explains it; longer than any detector takes."""
    probe_s: float = 20.0
    """How much longer it may wait for the probe of its devices."""
    hang_after_s: float | None = 30.0
    """The least time without a committed step before workers are asked where they are; None: never. The bound
    learned from the run's steps may be longer (`elastic.step_watch`)."""
    first_step_s: float = 600.0
    """The same for the first step of a world, which may have to be compiled, if it is more."""
    unwind_s: float = 2.0
    """How long a survivor may take to leave a broken world before it is ended and started again."""
    shadow_s: float = 900.0
    """How long the compiling of the next world's programs in the background may take."""
    stage_s: float = 120.0
    rebuild_s: float = 300.0
    prepare_s: float = 30.0
    """How long a slice that is to join may take to make room for snapshots before it joins all the same."""
    join_s: float = 60.0
    """How long the boundary for a join may take to be reached by all."""
    agent_grace_s: float = 4.0
    """How long a lost agent may take to come back before its slice counts as lost."""
    wait_s: float = 60.0
    """How long a job may wait below its minimum of slices, or for a host that holds what the others lack."""
    gather_s: float = 5.0
    """How long a job that could go on again waits for workers that are still starting."""
    lease_s: float = 30.0
    """How long a worker that nobody can reach may go on: waited out where it could make steps alone."""
    digest_s: float = 30.0
    finish_s: float = 60.0
    """How long the others may go on once a slice's loop has ended."""
    persist_s: float = 600.0
    """How long the end of a run waits for its last snapshot to get into the persistent tier."""

    def __post_init__(self) -> None:
        check_order(unwind_s=self.unwind_s, suspect_s=self.suspect_s, join_s=self.join_s)
        check_order(suspect_s=self.suspect_s, start_s=self.start_s)
        check_order(agent_grace_s=self.agent_grace_s, lease_s=self.lease_s)
        if self.hang_after_s is not None:
            check_order(suspect_s=self.suspect_s, hang_after_s=self.hang_after_s)
