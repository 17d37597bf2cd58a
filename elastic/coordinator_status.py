"""A job as JSON, for `elastic status`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from elastic.job import JobSpec
from elastic.quarantine import remaining_s
from elastic.records import StragglerSeen
from elastic.state import JobState


def describe_job(
    spec: JobSpec,
    state: JobState,
    epoch: int,
    refused: dict[str, dict[str, int]],
    stragglers: Iterable[StragglerSeen],
    now_s: float,
) -> bytes:
    """The job as its coordinator sees it, at `now_s` of that one's clock."""
    spares = state.spares()
    return msgspec.json.encode(
        {
            "job_id": spec.job_id,
            "phase": state.phase.value,
            "generation": state.generation,
            "epoch": epoch,
            "world": state.world_slices,
            "seats": state.seats,
            "newest_committed": state.newest_committed,
            "refused": refused,
            "stragglers": [
                {
                    "slice": seen.slice_index,
                    "host": seen.host_index,
                    "where": seen.where,
                    "factor": seen.factor,
                    "step": seen.step,
                }
                for seen in stragglers
            ],
            "newest_persisted": max((one.step for one in state.persisted), default=None),
            "persist_failed_step": None if state.persist_failed_step < 0 else state.persist_failed_step,
            "members": [
                {
                    "slice": state.config.slice_of(member.index),
                    "host": state.config.host(member.index).host_index,
                    "spare": member.index in spares,
                    "attached": member.attached,
                    "worker": member.worker.value,
                    "pid": member.worker_pid,
                    "starts": member.starts,
                    "losses_in_row": member.losses_in_row,
                    "quarantined_for_s": remaining_s(member.quarantined_until_s, now_s),
                }
                for member in state.members
            ],
        }
    )
