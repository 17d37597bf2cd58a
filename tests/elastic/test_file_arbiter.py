"""The file store: one winner whatever happens, also among processes that are killed and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from arbiter_contract import LEASE_S, ArbiterContract

from elastic.arbiter import ArbiterStore, Tenure
from elastic.file_arbiter import ArbiterDamagedError, FileArbiter

RACER = """
import sys
from pathlib import Path
from elastic.file_arbiter import FileArbiter
store = FileArbiter(Path(sys.argv[1]))
won = []
print("ready", flush=True)
sys.stdin.readline()
while (seen := store.read()) is None or seen.epoch < 20:
    claimed = store.claim(seen, 2.0)
    if claimed is not None:
        won.append(claimed.epoch)
print(*won, flush=True)
sys.stdin.readline()
"""


class TestFileArbiter(ArbiterContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], ArbiterStore]:
        made: list[FileArbiter] = []

        def build() -> ArbiterStore:
            made.append(FileArbiter(tmp_path / "arbiter"))
            return made[-1]

        return build


def race(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RACER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_racing_processes_never_win_the_same_epoch(tmp_path: Path) -> None:
    racers = [race(tmp_path) for _ in range(2)]
    for racer in racers:
        say(racer)
    won = [int(epoch) for racer in racers for epoch in racer.communicate("bye\n")[0].split()]
    assert sorted(won) == list(range(1, 21))


def test_killed_holder_is_dead_and_a_stopped_one_is_not(tmp_path: Path) -> None:
    racer = race(tmp_path)
    say(racer)
    assert racer.stdout is not None
    assert racer.stdout.readline()
    store = FileArbiter(tmp_path)
    held = store.read()
    assert held is not None
    os.kill(racer.pid, signal.SIGSTOP)
    assert not store.is_holder_dead(held)
    os.kill(racer.pid, signal.SIGKILL)
    racer.communicate()
    assert store.is_holder_dead(held)
    claimed = store.claim(held, LEASE_S)
    assert claimed is not None
    assert claimed.epoch == held.epoch + 1


def test_free_lock_of_another_machine_proves_nothing(tmp_path: Path) -> None:
    there = FileArbiter(tmp_path, machine="there")
    held = there.claim(None, LEASE_S)
    assert held is not None
    there.close()
    assert not FileArbiter(tmp_path, machine="here").is_holder_dead(held)
    assert FileArbiter(tmp_path, machine="there").is_holder_dead(held)


def test_renewal_between_a_claimants_look_and_its_claim_makes_the_claim_fail(tmp_path: Path) -> None:
    """Also where the look at the store came before the renewal, and the link after it."""

    class Late(FileArbiter):
        def read(self) -> Tenure | None:
            found = super().read()
            if found is not None and found.beat == 0:
                assert holder.renew(found) is not None
            return found

    holder = FileArbiter(tmp_path)
    held = holder.claim(None, LEASE_S)
    late = Late(tmp_path)
    assert late.claim(held, LEASE_S) is None
    now = holder.read()
    assert now is not None
    assert (now.epoch, now.beat) == (1, 1)


def test_unreadable_record_is_told_and_not_taken_for_none(tmp_path: Path) -> None:
    store = FileArbiter(tmp_path)
    (tmp_path / "epoch-3").write_text("{")
    with pytest.raises(ArbiterDamagedError, match="epoch-3 cannot be read"):
        store.read()
    with pytest.raises(ArbiterDamagedError):
        store.claim(None, LEASE_S)


def test_files_are_the_owners_only(tmp_path: Path) -> None:
    store = FileArbiter(tmp_path)
    store.claim(None, LEASE_S)
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}
