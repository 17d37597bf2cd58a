"""A job that counts the writes of its restores: sound ones pass, a doctored plan ends it with its reason."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from local_jobs import faults_at, make_spec, open_session, outcome, run, train

from elastic.agent_tasks import ArenaTasks
from elastic.events import Stage
from elastic.ports import JobOver
from elastic.records import WorldFormed
from reshard.errors import InvariantBrokenError
from reshard.transfer import Transfer
from reshard.write_counts import WriteCounts
from snapshot import placing

LOSS = {(1, 5): ("host", 1)}


def halved(transfer: Transfer) -> Transfer:
    (first, last), *rest = transfer.piece
    half = (last - first) // 2
    return replace(
        transfer,
        piece=((first, first + half), *rest),
        nbytes=transfer.nbytes * half // (last - first),
    )


def test_restore_of_a_spread_state_counts_one_write_an_element(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    check = WriteCounts.check_once
    monkeypatch.setattr(
        WriteCounts, "check_once", lambda self: (checked.append(int(self.counts.sum())), check(self))[1]
    )
    result = run(make_spec(tmp_path, root, replicas=2, count_writes=True), faults=LOSS, spread=True)
    assert result.report.run.outcome == "completed"
    assert set(result.report.invariants.values()) == {"held"}
    assert [world.bytes_moved > 0 for world in result.worlds if isinstance(world, WorldFormed)] == [
        False,
        True,
    ]
    assert checked


def test_doctored_plan_of_a_slice_ends_the_job_with_the_array_named(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_now = ArenaTasks.stage_now

    def doctored(self: ArenaTasks, command: Stage) -> None:
        stage_now(self, replace(command, transfers=tuple(map(halved, command.transfers))))

    monkeypatch.setattr(ArenaTasks, "stage_now", doctored)
    spec = make_spec(tmp_path, root, replicas=2, count_writes=True)
    with pytest.raises(JobOver):
        train(open_session(spec), 12, faults_at(LOSS), spread=True)
    error = outcome(spec).report.run.error
    assert error is not None
    assert "the restore failed" in error
    assert re.search(r"\['[mnw]'\].* elements are written 0 to 1 times", error), error


def test_restore_that_puts_boxes_together_wrongly_ends_the_job(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cover = placing._cover
    monkeypatch.setattr(
        "snapshot.placing._cover", lambda box, stored: [*cover(box, stored)[:-1], cover(box, stored)[0]]
    )
    spec = make_spec(tmp_path, root, replicas=2, count_writes=True)
    with pytest.raises(InvariantBrokenError, match=r"\['n'\].*elements are written 0 to 2 times"):
        train(open_session(spec), 12, faults_at(LOSS), spread=True)
    assert outcome(spec).report.run.outcome == "failed"
