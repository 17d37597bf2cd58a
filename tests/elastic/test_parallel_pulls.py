"""One state on several processes: each host pulls its own part out of the others' memory, all at once."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from agent_arenas import GENERATION, elements, layout_of_hosts
from pulling_host import Restore

from elastic.choose import other_holders
from elastic.events import Stage
from reshard.boxes import Box
from reshard.holdings import Holding
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.planner import make_plan
from reshard.redundancy import captures
from reshard.transfer import Transfer
from snapshot.checksum import checksum

TOKEN, STEP = "job-token", 4
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Hosts:
    """Processes, one a slice; those that `layout` names have captured their share of it."""

    layout: Layout
    processes: dict[int, subprocess.Popen[str]]
    addresses: dict[int, str]

    def plan(self, slices: list[int]) -> tuple[Layout, Any]:
        """The layout on these slices, and the plan from what all hold."""
        target = self.layout.resized([HostId(index) for index in slices], 1)
        holdings = [
            Holding(path=path, box=box, step=STEP, host=host, tier="shm", checksum=0)
            for host, shards in captures(self.layout, 1).items()
            for path, box in shards
        ]
        return target, make_plan(target, holdings, step=STEP)

    def restore(
        self,
        target: Layout,
        transfers: dict[int, tuple[Transfer, ...]],
        told: dict[int, tuple[Transfer, ...]],
    ) -> dict[int, Any]:
        """Have all hosts of `target` restore at the same time; `told` is what they are to stage."""
        for index, planned in transfers.items():
            remote = tuple(transfer for transfer in told[index] if not transfer.is_local)
            command = Stage(
                member=index,
                generation=GENERATION + 1,
                step=STEP,
                of_generation=GENERATION,
                layout=self.layout,
                transfers=remote,
                alternates=other_holders(remote, ()),
                addresses=self.addresses,
            )
            line = base64.b64encode(
                msgspec.json.encode(Restore(stage=command, target=target, transfers=planned))
            )
            pipe = self.processes[index].stdin
            assert pipe is not None
            pipe.write(line.decode() + "\n")
            pipe.flush()
        return {index: json.loads(self._line(index)) for index in transfers}

    def _line(self, index: int) -> str:
        pipe = self.processes[index].stdout
        assert pipe is not None
        return pipe.readline()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Four processes; the first three have captured."""
    layout = layout_of_hosts(3)
    described = base64.b64encode(msgspec.json.encode(layout)).decode()
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}"}
    processes: dict[int, subprocess.Popen[str]] = {}
    with contextlib.ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="elastic-slices-test-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, root)
        for index in range(4):
            arguments = [str(root), str(index), TOKEN, str(STEP), described]
            processes[index] = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "pulling_host.py"), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            stack.callback(processes[index].communicate, timeout=20)
        made = Hosts(layout, processes, {})
        made.addresses = {index: made._line(index).strip() for index in processes}
        yield made


def checksum_of(path: str, box: Box) -> int:
    values = np.ascontiguousarray(elements(path, STEP)[tuple(slice(*part) for part in box)])
    return checksum(values.reshape(-1).view(np.uint8))


@pytest.mark.parametrize(
    "slices",
    [[0, 2], [0, 1, 2, 3], [0, 3], [1]],
    ids=["one leaves", "one joins", "one joins and two leave", "one is left"],
)
def test_every_host_has_its_boxes_whole_when_all_pull_at_once(hosts: Hosts, slices: list[int]) -> None:
    target, plan = hosts.plan(slices)
    transfers = {index: plan.for_target(HostId(index)) for index in slices}
    answers = hosts.restore(target, transfers, transfers)
    for index, answer in answers.items():
        assert "error" not in answer, answer
        held = {(path, tuple(map(tuple, box))): found for path, box, found in answer["boxes"]}
        wanted = {
            (array.path, box) for array in target.arrays for box in target.boxes_by_host(array)[HostId(index)]
        }
        assert held == {(path, box): checksum_of(path, box) for path, box in wanted}
    assert sum(answer["received"] for answer in answers.values()) == plan.bytes_moved
    assert sum(answer["local"] for answer in answers.values()) == plan.bytes_local


def test_plan_that_was_doctored_on_its_way_to_one_host_is_found_by_that_host(hosts: Hosts) -> None:
    target, plan = hosts.plan([0, 1])
    transfers = {index: plan.for_target(HostId(index)) for index in (0, 1)}
    told = dict(transfers)
    remote = next(transfer for transfer in told[1] if not transfer.is_local and len(transfer.piece) == 2)
    (first, last), columns = remote.piece
    half = replace(remote, piece=((first, (first + last) // 2), columns), nbytes=remote.nbytes // 2)
    told[1] = tuple(half if transfer is remote else transfer for transfer in told[1])
    answers = hosts.restore(target, transfers, told)
    assert "error" not in answers[0]
    assert answers[1]["error"].startswith("InvariantBrokenError")
