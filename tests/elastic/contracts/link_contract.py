"""What every `elastic.ports.Link` must do; an adapter's tests subclass `LinkContract` and provide the job."""

from __future__ import annotations

from typing import Protocol

import pytest

from elastic.events import WorldSpec
from elastic.ports import JobOver, Link, Room
from reshard.copies import pack_checksums
from reshard.layout import ArrayLayout, Layout, MeshLayout
from snapshot.journal import JournalRecord, record_bytes


def room(slot_bytes: int) -> Room:
    return Room(slot_bytes=slot_bytes, journal_record_bytes=record_bytes(8), journal_records=4)


class LinkedJob(Protocol):
    """A job of at least two slices that goes on without one of them; no training script runs in it."""

    link: Link

    def lose_other_slice(self) -> None:
        """Let a slice die that is not the last one; returns at once."""
        ...

    def stop(self) -> None:
        """Have the job ended from outside; returns at once."""
        ...


class LinkContract:
    """Subclass it, with a fixture `job` that yields a `LinkedJob`."""

    def enter_world(self, job: LinkedJob) -> WorldSpec:
        world = job.link.wait_world()
        assert world is not None
        return world

    def rebuild(self, job: LinkedJob, world: WorldSpec) -> None:
        for host in job.link.arenas():
            job.link.reserve(host, room(4096))
        job.link.rebuilt(world.generation, None, 0.0, 0.0, 0)

    def test_first_world_is_fresh_and_of_all_slices(self, job: LinkedJob) -> None:
        world = self.enter_world(job)
        assert world.generation >= 1
        assert world.slices == tuple(range(len(world.slices)))
        assert (world.restore_step, world.newest_committed, world.rehearsal) == (None, -1, False)

    def test_world_is_not_fenced_while_nothing_happens_and_older_ones_are(self, job: LinkedJob) -> None:
        world = self.enter_world(job)
        assert not job.link.is_fenced(world.generation)
        assert job.link.is_fenced(world.generation - 1)
        assert job.link.stop_step(world.generation) is None
        assert job.link.audit_step(world.generation) is None
        assert not job.link.wait_fenced(world.generation, 0.05)
        assert job.link.wait_fenced(world.generation - 1, None)

    def test_arenas_belong_to_slices_of_the_world_and_take_what_was_reserved(self, job: LinkedJob) -> None:
        world = self.enter_world(job)
        arenas = job.link.arenas()
        assert {host.slice_index for host in arenas} <= set(world.slices)
        for host, arena in arenas.items():
            job.link.reserve(host, room(10_000))
            assert arena.slot_for_write(10_000, 0).capacity_bytes >= 10_000
            arena.journal().append(JournalRecord(step=0, generation=1, position=2, sample_ids=[0, 1]))

    def test_layout_and_checksums_of_a_capture_are_taken(self, job: LinkedJob) -> None:
        world = self.enter_world(job)
        hosts = world.hosts
        mesh = MeshLayout(axis_names=("data",), axis_sizes=(len(hosts),), hosts=hosts)
        array = ArrayLayout(path="w", shape=(4,), dtype="float32", itemsize=4)
        job.link.laid_out(world.generation, Layout(mesh=mesh, arrays=(array,), elastic_axis="data"))
        for host in job.link.arenas():
            for is_audit in (False, True):
                job.link.captured(host, world.generation, 0, pack_checksums([7]), is_audit=is_audit)
        self.rebuild(job, world)
        job.link.ended(world.generation, 0)
        assert not job.link.wait_fenced(world.generation, None)

    def test_no_copy_is_known_of_a_snapshot_that_was_not_taken(self, job: LinkedJob) -> None:
        world = self.enter_world(job)
        assert job.link.replicated_step(world.generation) in (None, -1)

    def test_loss_fences_the_world_and_the_next_is_without_the_lost_slice(self, job: LinkedJob) -> None:
        first = self.enter_world(job)
        self.rebuild(job, first)
        job.lose_other_slice()
        assert job.link.wait_fenced(first.generation, 10.0)
        assert job.link.is_fenced(first.generation)
        job.link.unwound(first.generation)
        second = self.enter_world(job)
        assert second.generation > first.generation
        assert set(second.slices) < set(first.slices)
        assert not job.link.is_fenced(second.generation)
        assert job.link.arenas()

    def test_end_of_the_loop_completes_the_job(self, job: LinkedJob) -> None:
        world = self.enter_world(job)
        self.rebuild(job, world)
        job.link.ended(world.generation, 0)
        assert not job.link.wait_fenced(world.generation, None)
        assert job.link.wait_world() is None

    def test_error_of_the_script_ends_the_job(self, job: LinkedJob) -> None:
        world = self.enter_world(job)
        self.rebuild(job, world)
        job.link.user_failed("ValueError: bad data", 1)
        with pytest.raises(JobOver):
            job.link.wait_fenced(world.generation, 10.0)
        with pytest.raises(JobOver):
            job.link.wait_world()

    def test_stopped_job_gives_up_its_world(self, job: LinkedJob) -> None:
        world = self.enter_world(job)
        job.stop()
        with pytest.raises(JobOver):
            job.link.wait_fenced(world.generation, 10.0)
        assert job.link.is_fenced(world.generation)
